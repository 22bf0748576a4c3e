// The chat page. Nothing is stored: conversation and API key end with the page.

import { find, make } from "./dom.js";
import { call, eventsOf } from "./events.js";
import { Answer, errorMessage, resultFields, toolMessage, userMessage } from "./messages.js";
import { Paging } from "./paging.js";

const RETRY_MS = 2000;
const DRAFT_MS = 350;
const NEAR_END = 60; // pixels: the list follows an answer that is read at its end
const MAX_DRAFT = 100_000; // characters that are counted while they are written
const EXAMPLE = [{ type: "function", function: { name: "get_weather", description: "Current weather of a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const ENDS = { length: "cut at the limit of tokens", tool_calls: "calls tools" };

const paging = new Paging();
let models = [];
let conversation = []; // as the API has it, without the system message
let running = null; // the AbortController of the running request
let counting = null;
let timer = 0;

const key = () => find("#key").value.trim();

function say(kind, text) {
  find("#status").className = document.documentElement.dataset.state = kind;
  find("#status span").textContent = text;
}

async function loadModels() {
  clearTimeout(timer);
  try {
    models = (await (await call("models", key())).json()).models;
    if (!models.length) throw new Error("no engine is ready");
    const names = models.map((one) => one.model), before = find("#model").value;
    find("#model").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(before)) find("#model").value = before;
    chooseModel();
    say("live", "ready");
  } catch (error) {
    if (error.status === 401) return askForKey();
    say("away", error.status || !(error instanceof TypeError) ? error.message : "the gateway is not reachable");
    timer = setTimeout(loadModels, RETRY_MS);
  }
}

function chooseModel() {
  paging.use(models.find((one) => one.model === find("#model").value));
}

function askForKey() {
  say("waiting", key() ? "the API key is not valid" : "an API key is needed");
  find("#options").open = true;
  find("#key").focus();
}

const history = () => [...(find("#system").value.trim() ? [{ role: "system", content: find("#system").value }] : []), ...conversation];

// The tools, undefined without any. Throws an Error.
function tools() {
  const text = find("#tools").value.trim();
  if (!text) return undefined;
  let given;
  try {
    given = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(given)) throw new Error("The tools must be a JSON list.");
  return given.length ? given : undefined;
}

function templateFields() {
  const thinking = find("#thinking").value;
  return { tools: tools(), chat_template_kwargs: thinking ? { enable_thinking: thinking === "true" } : undefined };
}

function body(id) {
  const number = (name) => (find(name).value === "" ? undefined : Number(find(name).value));
  return {
    model: find("#model").value,
    messages: history(),
    request_id: id,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: number("#temperature"),
    max_completion_tokens: number("#limit"),
    ...templateFields(),
  };
}

// 128 random bits: whoever knows the id may watch the request's blocks.
const newId = () => [...crypto.getRandomValues(new Uint8Array(16))].map((one) => one.toString(16).padStart(2, "0")).join("");

function add(element) {
  const list = find("#messages"), atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;
  list.append(element);
  find("#empty").hidden = true;
  if (atEnd) list.scrollTop = list.scrollHeight;
}

function send() {
  if (running) return running.abort();
  const text = find("#draft").value, own = conversation, { length } = own;
  if (!text.trim()) return;
  find("#draft").value = "";
  paging.plan(0);
  find(".results")?.remove();
  for (const { name, message } of emptyResults()) addResult(name, message);
  conversation.push({ role: "user", content: text });
  add(userMessage(text));
  return answer(() => {
    own.length = length;
    if (own === conversation) find("#draft").value ||= text;
  });
}

// Calls of the last answer that have no result; a history must have one for each, here an empty one.
const openCalls = () => conversation.at(-1)?.tool_calls || [];
const emptyResults = () => openCalls().map((one) => ({ name: one.function.name, message: { role: "tool", tool_call_id: one.id, content: "" } }));

function addResult(name, message) {
  conversation.push(message);
  add(toolMessage(name, message.content));
}

function sendResults(results) {
  const own = conversation, { length } = own;
  for (const { name, message } of results) addResult(name, message);
  return answer(() => (own.length = length));
}

// Asks for the next message; `undo` takes back what was sent if the request is refused.
async function answer(undo) {
  const id = newId(), shown = new Answer(), watching = new AbortController();
  const own = (running = new AbortController());
  find("#send").textContent = "stop";
  say("live", "answering");
  let failure = null, reason = "";
  try {
    const request = JSON.stringify(body(id));
    add(shown.element);
    paging.follow(id, key(), watching.signal);
    const response = await call("../v1/chat/completions", key(), { method: "POST", body: request, signal: own.signal });
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      reason = take(JSON.parse(data), shown) || reason;
    }
  } catch (error) {
    failure = error;
  }
  // The stream of blocks ends by itself, a moment after the request.
  setTimeout(() => watching.abort(), failure ? 0 : RETRY_MS);
  if (running === own) {
    running = null;
    find("#send").textContent = "send";
    say("live", "ready");
  }
  if (shown.element.isConnected || !shown.tokens) finish(shown, failure, { stopped: own.signal.aborted, reason, undo });
}

// Shows a chunk of the answer; returns the reason of its end.
function take(chunk, shown) {
  if (chunk.error) throw new Error(chunk.error.message);
  const list = find("#messages"), atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END;
  const [choice] = chunk.choices;
  shown.add(choice?.delta, chunk.usage);
  if (chunk.usage) paging.setCached(shown.cached, shown.prompt);
  if (atEnd) list.scrollTop = list.scrollHeight;
  return choice?.finish_reason;
}

function finish(shown, failure, { stopped, reason, undo }) {
  shown.finish(stopped ? "stopped" : ENDS[reason] || "");
  const wrote = shown.content || shown.reasoning || shown.calls.length;
  if (wrote) conversation.push(stopped || failure ? { ...shown.toMessage(), tool_calls: undefined } : shown.toMessage());
  else {
    shown.element.remove();
    if (!shown.tokens) undo();
  }
  if (failure && !stopped) add(errorMessage(failure.message.replace(/\.?$/, ".")));
  if (failure?.status === 401) askForKey();
  const calls = openCalls().map(({ id, function: of }) => ({ id, name: of.name }));
  if (calls.length) add(make("li", { class: "message" }, resultFields(calls, sendResults)));
}

// Counts the tokens of the draft: one request at a time, a moment after the last key.
async function countDraft() {
  const draft = find("#draft").value;
  counting?.abort();
  if (!draft.trim() || running || draft.length > MAX_DRAFT || document.documentElement.dataset.state !== "live") return paging.plan(0);
  counting = new AbortController();
  const { signal } = counting;
  try {
    const results = emptyResults().map((one) => one.message);
    const request = { model: find("#model").value, messages: [...history(), ...results, { role: "user", content: draft }], ...templateFields() };
    const counted = await (await call("../tokenize", key(), { method: "POST", body: JSON.stringify(request), signal })).json();
    if (!signal.aborted && find("#draft").value === draft) paging.plan(counted.count);
  } catch {
    if (!signal.aborted) paging.plan(0);
  }
}

let pause = 0;
function countSoon() {
  clearTimeout(pause);
  pause = setTimeout(countDraft, DRAFT_MS);
}
find("#draft").addEventListener("input", countSoon);
for (const name of ["#system", "#tools", "#thinking", "#model"]) find(name).addEventListener("change", countSoon);
find("#draft").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) send();
});
find("#send").addEventListener("click", send);
find("#model").addEventListener("change", chooseModel);
find("#key").addEventListener("change", loadModels);
find("#example").addEventListener("click", () => {
  find("#tools").value = JSON.stringify(EXAMPLE, null, 1);
  countSoon();
});
find("#new").addEventListener("click", () => {
  running?.abort();
  conversation = []; // what a request in flight adds or takes back is of the old one
  find("#messages").replaceChildren();
  find("#empty").hidden = false;
  paging.clear();
  find("#draft").focus();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
addEventListener("pagehide", () => running?.abort()); // a page that the browser keeps for "back" would go on

loadModels();
find("#draft").focus();

// For tests.
window.chatPage = { paging, get conversation() { return conversation; } };
