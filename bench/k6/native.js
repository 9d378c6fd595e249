// POST /results/, then GET /results/{id}?wait=: a result by the service's own routes, as the client
// sees it in all; see common.js for -e. MODEL must be given.

import http from "k6/http";
import { check } from "k6";
import { isRight, judge, member, model, parameters, prompt, tokens, url } from "./common.js";

export { options } from "./common.js";

const body = JSON.stringify({
  model,
  content: prompt,
  parameters: { max_tokens: tokens, temperature: 0 },
});
const sent = parameters("/results/");
const asked = parameters("/results/{id}");
const checks = {
  "status is 200": (response) => response.status === 200,
  "state is completed": (response) => member(response, "state") === "completed",
  "text is right": (response) => isRight(member(response, "result")),
};

export default function () {
  const accepted = http.post(`${url}/results/`, body, sent);
  const isAccepted = check(accepted, {
    "is accepted": (response) => response.status === 202 && Boolean(response.headers.Location),
  });
  if (isAccepted) {
    judge([accepted, http.get(`${url}${accepted.headers.Location}?wait=30`, asked)], checks);
  }
}
