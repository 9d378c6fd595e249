// A result's text as a stream: `data-stream` names its events, `data-answer` the part that replaces it
// at the end. Text is appended once a frame as text nodes, never as HTML, and never rendered twice.
//
// A browser has six connections to a host, for all its tabs: a hidden page holds none, and resumes its
// streams when it is visible again.
import { endOf, prepare, showOffline } from "./parts.js";

const RETRY_MS = 2000;
// A browser lays out a block again for each text that is added to it: long ones are closed.
const BLOCK = 4000;
// Offsets count code points, JavaScript UTF-16 units.
const countPoints = (text) => { let n = 0; for (const _ of text) n += 1; return n; };

export function followStreams(root) {
  const texts = [...root.querySelectorAll("[data-stream]")].map((element) => new LiveText(element));
  const look = () => { for (const text of texts) document.hidden ? text.pause() : text.open(); };
  document.addEventListener("visibilitychange", look);
  addEventListener("pagehide", () => { for (const text of texts) text.pause(); });
  addEventListener("pageshow", look);
}

class LiveText {
  constructor(element) {
    this.element = element;
    this.output = element.querySelector("[data-live=text]");
    this.figures = element.querySelector("[data-live=figures]");
    this.state = element.querySelector("[data-live=state]");
    this.reset();
    this.position = "";
  }

  reset(kept = "") {
    if (this.frame !== undefined) cancelAnimationFrame(this.frame); // it would draw what is gone
    this.frame = undefined;
    this.points = countPoints(kept);
    this.waiting = "";
    this.tokens = null;
    this.sentAt = null;
    this.firstAt = null;
    this.firstTokens = 0;
    this.output.textContent = "";
    this.beginBlock();
    if (kept) this.write(kept);
  }

  beginBlock() {
    this.block = document.createElement("span");
    this.blockLength = 0;
    this.output.append(this.block);
  }

  // Blocks end where lines do; one line that is very long is broken.
  write(text) {
    const end = this.blockLength > BLOCK ? text.indexOf("\n") + 1 : 0;
    if (end > 0 || this.blockLength > 4 * BLOCK) {
      this.block.append(text.slice(0, end));
      this.beginBlock();
      text = text.slice(end);
    }
    this.block.append(text);
    this.blockLength += text.length;
  }

  open() {
    if (this.source || this.hasEnded) return;
    clearTimeout(this.retry);
    const url = this.element.dataset.stream + (this.position ? `?after=${this.position}` : "");
    this.source = new EventSource(url);
    for (const name of ["attempt", "delta", "completed", "failed"]) {
      this.source.addEventListener(name, (event) => this.take(name, event));
    }
    this.source.addEventListener("error", () => this.lost());
    this.source.addEventListener("open", () => this.found());
  }

  pause() {
    clearTimeout(this.retry);
    this.source?.close();
    this.source = null;
  }

  take(name, event) {
    this.position = event.lastEventId;
    if (name === "attempt") this.begin(JSON.parse(event.data));
    else if (name === "delta") this.append(JSON.parse(event.data));
    else this.end();
  }

  // The API returns the result's age: clocks of two machines are never compared.
  begin({ attempt, age, continued_from: continuedFrom = 0 }) {
    this.state.textContent = "running";
    this.state.className = "badge running";
    const how = continuedFrom > 0 ? "continues its text" : "begins anew";
    if (attempt > 1) this.figures.textContent = `Attempt ${attempt}: the one before was lost, this one ${how}.`;
    const known = this.output.textContent + this.waiting;
    this.reset([...known].slice(0, continuedFrom).join(""));
    this.sentAt = age === undefined ? null : performance.now() - 1000 * age;
  }

  append({ text, offset, completion_tokens: tokens }) {
    if (offset !== this.points) return; // sent twice
    if (this.firstAt === null) {
      this.firstAt = performance.now();
      this.firstTokens = tokens ?? 0;
      this.isCatchUp = text.length > 400; // others have seen its beginning
    }
    this.points += countPoints(text);
    this.tokens = tokens ?? this.tokens;
    this.waiting += text;
    if (this.frame === undefined) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = undefined;
    const output = this.output;
    const isAtEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 40;
    this.write(this.waiting);
    this.waiting = "";
    if (isAtEnd) output.scrollTop = output.scrollHeight;
    this.tell();
  }

  tell() {
    const parts = [];
    if (!this.isCatchUp && this.sentAt !== null) parts.push(`first token after ${((this.firstAt - this.sentAt) / 1000).toFixed(2)} s`);
    const seconds = (performance.now() - this.firstAt) / 1000;
    if (this.tokens !== null) {
      parts.push(`${this.tokens.toLocaleString()} tokens`);
      if (seconds > 0.5) parts.push(`${((this.tokens - this.firstTokens) / seconds).toFixed(1)} tokens/s`);
    } else {
      parts.push(`${this.points.toLocaleString()} characters`);
    }
    this.figures.textContent = parts.join(" · ");
  }

  async end() {
    this.hasEnded = true;
    this.pause();
    if (this.frame !== undefined) { cancelAnimationFrame(this.frame); this.draw(); }
    const response = await fetch(this.element.dataset.answer, { headers: { "X-Part": "1" } }).catch(() => null);
    if (response && this.isOver(response.status)) return;
    if (!response?.ok) { setTimeout(() => this.end(), RETRY_MS); return; }
    const answer = this.element.querySelector(".answer");
    const isFocused = answer.contains(document.activeElement);
    answer.innerHTML = await response.text();
    const state = response.headers.get("X-State");
    this.state.textContent = state;
    this.state.className = `badge ${state}`;
    prepare(answer);
    if (isFocused) answer.querySelector(".output")?.focus();
    this.element.dispatchEvent(new CustomEvent("answered", { bubbles: true }));
  }

  // EventSource reconnects by itself after a break, with the last id; after a refusal it stops, without
  // a reason.
  async lost() {
    showOffline("The connection is lost. The result goes on, and so does this page once it is back.");
    if (this.source?.readyState !== EventSource.CLOSED) return;
    this.pause();
    const response = await fetch(this.element.dataset.answer, { headers: { "X-Part": "1" } }).catch(() => null);
    if (response && this.isOver(response.status)) return;
    this.retry = setTimeout(() => { if (!document.hidden) this.open(); }, RETRY_MS);
  }

  // Deleted meanwhile, or the sign-in is over.
  isOver(status) {
    const end = endOf(status);
    if (!end) return false;
    this.hasEnded = true;
    showOffline(end);
    if (status === 404) { this.state.textContent = "deleted"; this.state.className = "badge"; }
    return true;
  }

  found() { showOffline(""); }
}
