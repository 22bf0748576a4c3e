// The messages of a conversation on the page. What a model writes is inserted as text alone.

import { find, make, number } from "./dom.js";

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 2 : 1)} s`;

export function userMessage(text) {
  return make("li", { class: "message user" }, make("p", { class: "text" }, text));
}

export function toolMessage(name, text) {
  return make("li", { class: "message tool" }, make("small", {}, `result of ${name}`), make("p", { class: "text" }, text));
}

export function errorMessage(text) {
  return make("li", { class: "message error", role: "alert" }, make("p", { class: "text" }, text));
}

// An answer while it arrives.
export class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.calls = [];
    this.tokens = 0;
    this.element = make("li", { class: "message assistant" }, make("p", { class: "text" }), make("p", { class: "speed" }, "waiting"));
    this.text = this.element.children[0].appendChild(document.createTextNode(""));
    this.speed = this.element.children[1];
    this.begun = performance.now();
  }

  // Takes a delta of OpenAI's stream.
  add(delta, usage) {
    this.now = performance.now();
    if (usage) this.count(usage);
    if (delta?.reasoning) this.addThought(delta.reasoning);
    if (delta?.content) {
      this.content += delta.content;
      this.text.appendData(delta.content);
    }
    for (const part of delta?.tool_calls || []) this.addCall(part);
    this.showSpeed();
  }

  count(usage) {
    if (usage.completion_tokens && !this.first) {
      this.first = this.now;
      this.atFirst = usage.completion_tokens;
    }
    this.tokens = usage.completion_tokens;
    this.prompt = usage.prompt_tokens;
    this.cached = usage.prompt_tokens_details?.cached_tokens || 0;
    this.thoughts = usage.completion_tokens_details?.reasoning_tokens || 0;
  }

  addThought(text) {
    if (!this.reasoning) {
      const fold = make("details", { class: "thought" }, make("summary", {}, "thinking"), make("p", { class: "text" }));
      this.element.prepend(fold);
      this.summary = find("summary", fold);
      this.thought = find("p", fold).appendChild(document.createTextNode(""));
    }
    this.reasoning += text;
    this.thought.appendData(text);
    this.summary.textContent = `thinking: ${number(this.thoughts)} tokens`;
  }

  addCall(part) {
    let call = this.calls[part.index];
    if (!call) {
      call = this.calls[part.index] = { id: "", name: "", arguments: "" };
      call.element = make("div", { class: "call" }, make("b", {}), make("pre", {}));
      call.text = find("pre", call.element).appendChild(document.createTextNode(""));
      this.speed.before(call.element);
    }
    call.id += part.id || "";
    call.name += part.function?.name || "";
    find("b", call.element).textContent = call.name;
    call.arguments += part.function?.arguments || "";
    call.text.appendData(part.function?.arguments || "");
  }

  // Tokens a second, from the first token on.
  get rate() {
    const ms = this.now - this.first;
    return ms > 0 && this.tokens > this.atFirst ? (1000 * (this.tokens - this.atFirst)) / ms : 0;
  }

  showSpeed(end = "") {
    if (!this.tokens) return;
    this.speed.textContent = [
      `${number(this.tokens)} tokens`,
      this.rate ? `${this.rate.toFixed(1)} tokens/s` : "",
      `first after ${seconds(this.first - this.begun)}`,
      end,
    ].filter(Boolean).join(" · ");
  }

  finish(reason) {
    if (this.summary) this.summary.textContent = `thought: ${number(this.thoughts)} tokens`;
    if (!this.tokens) this.speed.textContent = reason || "";
    this.showSpeed(reason);
    this.element.classList.add("whole");
  }

  // As the next request has it; thoughts too, so that its prompt begins with the same tokens.
  toMessage() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    const calls = this.calls.filter(Boolean);
    if (calls.length) message.tool_calls = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return message;
  }
}

// Fields for the results of calls; `onSend` receives the messages with them.
export function resultFields(calls, onSend) {
  const fields = calls.map((call) => ({ call, field: make("textarea", { rows: 1, "aria-label": `Result of ${call.name}`, placeholder: `result of ${call.name}`, autocomplete: "off" }) }));
  const box = make("div", { class: "results" }, ...fields.map(({ field }) => field), make("button", { type: "button", onclick: () => {
    box.remove();
    onSend(fields.map(({ call, field }) => ({ name: call.name, message: { role: "tool", tool_call_id: call.id, content: field.value } })));
  } }, fields.length > 1 ? "send results" : "send result"));
  return box;
}
