// POST /generate, the request of Text Generation Inference's clients; see common.js for -e.
//
//   FULL=1   the answer must have all TOKENS tokens, so that each is as long as any other

import http from "k6/http";
import { isRight, judge, member, model, parameters, prompt, tokens, url } from "./common.js";

export { options } from "./common.js";

const body = JSON.stringify({ model, inputs: prompt, parameters: { max_new_tokens: tokens } });
const sent = parameters("/generate");
const checks = {
  "status is 200": (response) => response.status === 200,
  "text is right": (response) => isRight(member(response, "generated_text")),
};
if (__ENV.FULL) {
  checks["all tokens"] = (response) => Number(response.headers["X-Generated-Tokens"]) === tokens;
}

export default function () {
  judge([http.post(`${url}/generate`, body, sent)], checks);
}
