"use strict";
// The page of `rlhf serve --ui`. Texts of models and people are only ever inserted as text nodes.

const $ = (id) => document.getElementById(id);
const SETTINGS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const WHO = { user: "you", assistant: "model", system: "system" };
const ENDS = { length: "cut at max tokens", stop: "" };
// Characters that are not seen, or that move or hide others: controls, marks and overrides of direction, tags.
const HIDDEN = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}])/u;

let state = null; // of the server
let replies = []; // of the question: {text, finish}
let models = null; // of each side, once they may be known
let scores = null;
let key = ""; // the judgement
let drawing = null; // aborts the replies that are drawn
// What a page that is loaded again needs: the conversation before the replies, the question, the number of the prompt,
// and whether the conversation is that prompt alone.
const kept = { talk: [], question: null, place: null, atPrompt: false, settings: {}, ...JSON.parse(sessionStorage.getItem("rlhf") || "{}") };
const keep = () => sessionStorage.setItem("rlhf", JSON.stringify(kept));

// --- text

function show(node, text) {
  node.replaceChildren(...text.split(HIDDEN).map((part, at) => at % 2 ? element("span", "control", escaped(part)) : part));
}

function escaped(character) {
  return `\\u{${character.codePointAt(0).toString(16)}}`;
}

function element(name, className, text = "") {
  const node = document.createElement(name);
  node.className = className;
  node.textContent = text;
  return node;
}

function textNode(text) {
  const node = element("div", "text");
  node.dir = "auto";
  show(node, text);
  return node;
}

// --- the server

async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const token = sessionStorage.getItem("rlhf token");
  if (token) headers.Authorization = `Bearer ${token}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  let response;
  try {
    response = await fetch(`/ui/${path}`, { ...options, headers, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server does not answer; is it running?");
  }
  if (response.ok) return response;
  if (response.status === 401) login(Boolean(token));
  const failure = new Error(response.statusText);
  failure.status = response.status;
  try { failure.message = (await response.json()).error.message; } catch { /* not from this server */ }
  throw failure;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part.replace(/^data: /, ""));
  }
}

function login(again) {
  $("app").hidden = true;
  $("login").hidden = false;
  if (again) $("login").querySelector("h1").textContent = "This is not the server's token";
  $("token").focus();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("rlhf token", $("token").value.trim());
  $("token").value = "";
  start();
});

// --- what is shown

const judged = () => state.models.length > 1;
const isComplete = () => replies.length > 0 && replies.every((reply) => reply.finish);
const mayTalk = () => !drawing && (!replies.length || !isComplete() || !judged() || key);

function say(text, wrong = false) {
  show($("status"), text);
  $("status").classList.toggle("wrong", wrong);
}

function render() {
  $("talk").replaceChildren(...kept.talk.map(({ role, content }) => {
    const turn = element("div", `turn ${role}`);
    turn.append(element("div", "who", WHO[role] || role), textNode(content));
    return turn;
  }));
  $("replies").replaceChildren(...replies.map((reply, side) => {
    const card = element("article", "reply");
    card.classList.toggle("drawing", Boolean(drawing) && !reply.finish && (side === 0 || Boolean(replies[side - 1].finish)));
    card.classList.toggle("chosen", key === String(side + 1));
    const head = element("header", "");
    const name = element("b", "");
    show(name, judged() ? `${side + 1}${models ? ` · ${models[side]}` : ""}` : state.models[0]);
    head.append(name);
    if (scores) head.append(element("span", "score", `reward ${scores[side].toPrecision(4)}`));
    card.append(head, textNode(reply.text || (reply.finish ? "(empty)" : "")));
    if (ENDS[reply.finish]) card.append(element("div", "note", ENDS[reply.finish]));
    return card;
  }));
  $("verdict").hidden = !(judged() && isComplete() && !key && !drawing);
  $("stop").hidden = !drawing;
  $("score").hidden = !(state.reward_model && isComplete() && kept.question && !scores && !drawing);
  $("draw").hidden = !(kept.talk.length && kept.talk.at(-1).role === "user" && !drawing && !key);
  $("draw").firstChild.textContent = replies.length ? "Draw again " : "Draw ";
  $("next").hidden = !(state.prompts && !drawing && (key || !judged()) && following() !== null);
  $("reset").hidden = !(kept.talk.length && !drawing && !state.prompts);
  $("send").disabled = $("message").disabled = !mayTalk();
  $("message").placeholder = drawing || mayTalk() ? "Message" : "Judge the replies first.";
  $("previous").disabled = Boolean(drawing) || !kept.place;
  $("following").disabled = Boolean(drawing) || kept.place === null || kept.place + 1 >= state.prompts;
  $("place").textContent = kept.place === null ? `${count(state.prompts, "prompt")}` : `prompt ${kept.place + 1} of ${state.prompts}`;
  renderSummary();
  renderTally();
}

function renderSummary() {
  $("summary").textContent = SETTINGS.filter((name) => $(name).value !== "" && !(name === "top_p" && $(name).value === "1")
    && !(name === "top_k" && $(name).value === "0")).map((name) => `${name.replace("_", " ")} ${$(name).value}`).join(" · ");
}

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
const percent = (share) => (100 * share).toFixed(1);

function renderTally() {
  const sofar = state.judgements;
  if (!sofar) return;
  let text = `${count(sofar.pairs, "pair")}, ${count(sofar.ties, "tie")} and ${count(sofar.skips, "skip")} in ${sofar.file}.`;
  const rate = sofar.win_rate;
  if (rate) {
    const [low, high] = rate.interval;
    text += ` ${state.models[1]} is preferred to ${state.models[0]} for ${percent(rate.share)} % [${percent(low)}, ${percent(high)}]`
      + ` of ${count(rate.labels, "judgement")}; a tie counts half, brackets are the 95 % interval.`;
  }
  show($("tally"), text);
}

// --- questions

function clear() {
  [replies, models, scores, key, kept.question] = [[], null, null, "", null];
}

async function draw() {
  clear();
  const invalid = SETTINGS.find((name) => !$(name).checkValidity());
  if (invalid) {
    $("settings").open = true;
    $(invalid).reportValidity();
    return;
  }
  const body = Object.fromEntries(SETTINGS.filter((name) => $(name).value !== "").map((name) => [name, Number($(name).value)]));
  if (kept.atPrompt) body.prompt = kept.place;
  else body.messages = state.converses ? kept.talk : kept.talk.slice(-1);
  drawing = new AbortController();
  replies = state.models.map(() => ({ text: "", finish: "" }));
  say("");
  render();
  $("message").blur();
  let [message, wrong] = [judged() ? "Which reply is better?" : "", false];
  try {
    for await (const event of events(await ask("ask", body, drawing.signal))) {
      if (event.error) throw new Error(event.error.message);
      if (event.question) {
        kept.question = event.question;
        if (kept.atPrompt) kept.talk = event.messages;
        keep();
      }
      if (event.models !== undefined) models = event.models;
      if (event.side !== undefined) {
        replies[event.side].text += event.text;
        replies[event.side].finish = event.finish;
      }
      schedule();
    }
    if (!isComplete()) throw new Error("the server has ended before the replies were complete; draw again");
  } catch (error) {
    wrong = error.name !== "AbortError";
    message = wrong ? error.message : "Stopped.";
  }
  drawing = null;
  keep();
  say(message, wrong);
  render();
  if (!judged() && !state.prompts) $("message").focus();
}

let scheduled = false;
function schedule() { // at most once a frame
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; render(); });
}

async function judge(pressed) {
  if (key || !isComplete() || !judged() || drawing) return;
  await attempt(async () => {
    const answer = await (await ask("judge", { question: kept.question, key: pressed })).json();
    key = pressed;
    models = answer.models;
    Object.assign(state, { judgements: answer.judgements, next: answer.next });
    say({ "=": "A tie.", s: "Skipped." }[pressed] || `Reply ${pressed} is preferred.`);
  });
  if (key && !state.prompts) $("message").focus();
}

async function attempt(action) {
  try { await action(); } catch (error) { say(error.message, true); }
  keep();
  if (state) render();
}

const score = () => attempt(async () => {
  scores = (await (await ask("score", { question: kept.question })).json()).scores;
});

// The number of the prompt after this one: the first without a judgement, or the next in order if nothing is judged.
function following() {
  if (judged()) return state.next;
  const next = kept.place === null ? 0 : kept.place + 1;
  return next < state.prompts ? next : null;
}

async function go(place, andDraw) {
  await attempt(async () => {
    const { messages } = await (await ask(`prompt?number=${place}`)).json();
    clear();
    [kept.talk, kept.place, kept.atPrompt] = [messages, place, true];
    say("");
  });
  if (andDraw && kept.place === place) await draw();
}

function send() {
  const text = $("message").value;
  if (!text.trim() || !mayTalk()) return;
  const preferred = replies[key === "2" ? 1 : 0];
  if (isComplete()) kept.talk.push({ role: "assistant", content: preferred.text });
  else if (kept.talk.at(-1)?.role === "user") kept.talk.pop(); // it has no reply
  kept.talk.push({ role: "user", content: text });
  kept.atPrompt = false;
  $("message").value = "";
  draw();
}

// --- events

$("say").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  if (event.key === "Escape") $("message").blur();
});
for (const name of SETTINGS) {
  $(name).addEventListener("input", () => { kept.settings[name] = $(name).value; keep(); renderSummary(); });
}
for (const button of $("verdict").children) button.addEventListener("click", () => judge(button.dataset.key));
const actions = {
  next: () => go(following(), true),
  draw,
  score,
  stop: () => drawing.abort(),
  reset: () => { clear(); kept.talk = []; keep(); say(""); render(); $("message").focus(); },
  previous: () => go(kept.place - 1, false),
  following: () => go(kept.place + 1, false),
};
for (const [name, action] of Object.entries(actions)) $(name).addEventListener("click", action);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target.matches("input, textarea")) return;
  const pressed = event.key.toLowerCase();
  const shortcut = { n: "next", d: "draw", r: "score" }[pressed];
  if (["1", "2", "=", "s"].includes(pressed) && !$("verdict").hidden) judge(pressed);
  else if (shortcut && !$(shortcut).hidden) actions[shortcut]();
  else return;
  event.preventDefault();
});

async function start() {
  try {
    state = await (await ask("state")).json();
  } catch (error) {
    if (error.status === 401) return;
    $("app").hidden = false;
    say(error.message, true);
    return;
  }
  $("login").hidden = true;
  $("app").classList.toggle("alone", !judged());
  const [first, second] = state.models;
  show($("title"), !judged() ? first : first === second ? `two samples of ${first}` : `${first} against ${second}`);
  show($("about"), [
    ...(judged() ? ["The sides are drawn by lot for each question; the names appear when you have judged."] : []),
    ...(state.converses ? [] : ["The model sees only your last message."]),
    ...(state.reward_model ? [`Reward model: ${state.reward_model}.`] : []),
  ].join(" "));
  document.title = `rlhf: ${first}`;
  const usual = { temperature: judged() ? 1 : 0.7, max_tokens: Math.min(256, state.max_tokens), top_p: 1, top_k: 0, seed: "" };
  $("max_tokens").max = state.max_tokens;
  for (const name of SETTINGS) $(name).value = kept.settings[name] ?? usual[name];
  $("prompts").hidden = !state.prompts;
  if (kept.place !== null && kept.place >= state.prompts) [kept.place, kept.atPrompt] = [null, false];
  if (kept.question) {
    try {
      ({ replies, models, key } = await (await ask(`question?id=${encodeURIComponent(kept.question)}`)).json());
    } catch { clear(); } // the server was started again
  }
  if (state.prompts && !kept.question && (kept.atPrompt || !kept.talk.length)) await go(kept.place ?? state.next ?? 0, false);
  if (isComplete() && judged() && !key) say("Which reply is better?");
  render();
  $("app").hidden = false;
}

start();
