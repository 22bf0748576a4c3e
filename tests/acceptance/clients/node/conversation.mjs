// The conversation that each client has with the scripted engine.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

export const said = JSON.parse(readFileSync(new URL("./conversation.json", import.meta.url), "utf8"));
export const { model, system, question, answer, remark, thoughts, calls, results, tools } = said;
export const baseURL = process.env.BASE_URL;
export const rootURL = baseURL.replace(/\/v1$/, "");
export const key = process.env.KEY;
export const spentKey = process.env.SPENT_KEY;
export const overflow = "train ".repeat(20_000);

export function resultOf(name, given) {
  const at = calls.findIndex((call) => call.name === name && call.arguments.city === given.city);
  assert.deepEqual({ name, arguments: given }, calls[at]);
  return results[at];
}

// The engine received all calls and results in order, and the thoughts if the client sends them; null: either.
export function checkPrompt({ withThoughts = false } = {}) {
  const prompt = JSON.parse(readFileSync(process.env.PROMPTS, "utf8").trim().split("\n").at(-1));
  const places = [system, question, remark, ...results].map((text) => prompt.indexOf(text));
  assert.ok(!places.includes(-1), prompt);
  assert.deepEqual(places, places.toSorted((one, other) => one - other), prompt);
  for (const call of calls) assert.ok(prompt.includes(`{"name": "${call.name}", "arguments": {`), prompt);
  if (withThoughts === null) return;
  for (const thought of thoughts) assert.equal(prompt.includes(thought), withThoughts, prompt);
}
