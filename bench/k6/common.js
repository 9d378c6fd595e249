// What the scripts share: the load, the request, and what counts as an answer.
//
//   k6 run --no-usage-report -e URL=http://127.0.0.1:8887 -e USERS=16 bench/k6/generate.js
//
//   URL      the service (http://127.0.0.1:8887)
//   TOKEN    what it wants in Authorization, if anything
//   MODEL    a model's name; /generate has a default where only one is ready
//   PROMPT   what is sent ("def ")
//   TOKENS   most tokens to generate (16)
//   TEXT     what the answer must be; unset: any text
//   USERS    virtual users, each of which sends its next request after an answer (1)
//   SECONDS  how long they go on; answers under way are waited for (4)

import { check } from "k6";
import { Trend } from "k6/metrics";

export const url = __ENV.URL || "http://127.0.0.1:8887";
export const model = __ENV.MODEL || undefined;
export const prompt = __ENV.PROMPT || "def ";
export const tokens = Number(__ENV.TOKENS || 16);

// A request that hangs fails by itself before k6 would interrupt it, which nothing would count.
export const options = {
  scenarios: {
    load: {
      executor: "constant-vus",
      vus: Number(__ENV.USERS || 1),
      duration: `${__ENV.SECONDS || 4}s`,
      gracefulStop: "60s",
    },
  },
  thresholds: { checks: ["rate==1"], http_req_failed: ["rate==0"] },
};

export function parameters(name) {
  const headers = { "Content-Type": "application/json" };
  if (__ENV.TOKEN) headers.Authorization = `Bearer ${__ENV.TOKEN}`;
  // One name for all ids: k6 keeps figures of each.
  return { headers, timeout: "50s", tags: { name } };
}

// Milliseconds from request to answer, of right answers only: of fewer than k6's iterations, then,
// when any failed.
const answer = new Trend("answer", true);

export function judge(responses, checks) {
  if (check(responses[responses.length - 1], checks)) {
    answer.add(responses.reduce((sum, response) => sum + response.timings.duration, 0));
  }
}

// A member of a JSON body; undefined where the body is no JSON.
export function member(response, name) {
  try {
    return response.json(name);
  } catch {
    return undefined;
  }
}

export function isRight(text) {
  return __ENV.TEXT === undefined ? typeof text === "string" && text !== "" : text === __ENV.TEXT;
}
