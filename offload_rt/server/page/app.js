// Web page: conversations in browser storage, and the passes behind each answer.
import { complete, get } from "./api.js";
import { drawTree } from "./tree.js";

const at = (id) => document.getElementById(id);
const kept = (name, otherwise) => JSON.parse(localStorage.getItem(name) ?? "null") ?? otherwise;
const keep = (name, value) => localStorage.setItem(name, JSON.stringify(value));

let chats = kept("chats", []);
let open = kept("open", null);
let settings = kept("settings", {});
let model = "";
let running = null;  // AbortController of the running answer
let lastTree = null;  // last pass with more than a root

const chat = () => chats.find((entry) => entry.id === open);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function save() {
  keep("chats", chats);
  keep("open", open);
}

function show() {
  at("chats").replaceChildren(...chats.map((entry) => {
    const select = element("button", { type: "button", className: "open", textContent: entry.title, onclick: () => choose(entry.id) });
    select.setAttribute("aria-current", String(entry.id === open));
    const remove = element("button", { type: "button", textContent: "×", onclick: () => drop(entry.id) });
    remove.setAttribute("aria-label", `Delete ${entry.title}`);
    return element("li", {}, select, remove);
  }));
  const messages = chat()?.messages ?? [];
  at("log").replaceChildren(...messages.map((message, n) => article(message, n === messages.length - 1)));
  at("log").scrollTop = at("log").scrollHeight;
  at("send").hidden = running !== null;
  at("stop").hidden = running === null;
}

function article(message, isLast) {
  const text = element("div", { className: "text" });
  if (message.pieces) text.append(...message.pieces.map(span));
  else text.textContent = message.content;
  const whole = element("article", { className: message.role }, element("h3", { textContent: message.role === "user" ? "You" : "Model" }), text);
  if (message.role === "assistant" && isLast && running === null) {
    const again = element("button", { type: "button", id: "regenerate", textContent: "Regenerate", onclick: regenerate });
    whole.append(element("div", { className: "actions" }, again));
  }
  return whole;
}

function span(piece, n) {
  const title = `pass ${n + 1}: ${piece.tokens} ${piece.tokens === 1 ? "token" : "tokens"} in ${piece.seconds.toFixed(2)} s`;
  return element("span", { className: `pass pass-${n % 4}`, title, textContent: piece.text });
}

function choose(id) {
  running?.abort();
  open = id;
  save();
  show();
  at("prompt").focus();
}

function drop(id) {
  chats = chats.filter((entry) => entry.id !== id);
  choose(open === id ? (chats[0]?.id ?? null) : open);
}

async function send(event) {
  event?.preventDefault();
  const content = at("prompt").value.trim();
  if (!content || running) return;
  if (!chat()) {
    open = crypto.randomUUID?.() ?? String(Date.now());
    chats.unshift({ id: open, title: content.slice(0, 60), messages: [] });
  }
  chat().messages.push({ role: "user", content });
  at("prompt").value = "";
  await answer();
}

async function regenerate() {
  chat().messages.pop();
  await answer();
}

async function answer() {
  const mine = chat(), controller = (running = new AbortController());
  const { system, key, ...sampling } = settings;
  const messages = mine.messages.map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  const message = { role: "assistant", content: "", pieces: [] };
  mine.messages.push(message);
  say("Reading the prompt");
  show();
  try {
    for await (const chunk of complete({ model, messages, ...sampling }, key, controller.signal)) {
      for (const choice of chunk.choices) take(message, choice.delta.content ?? "", chunk.pass);
    }
    say("");
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped" : error.message);
  }
  if (!message.content) mine.messages.pop();
  running = null;
  save();
  show();
  at("prompt").focus();
}

function take(message, text, pass) {
  if (!pass && !text) return;
  message.content += text;
  const piece = { text, tokens: pass?.tokens ?? 0, seconds: pass?.seconds ?? 0 };
  message.pieces.push(piece);
  if (pass) {
    say("");
    if (pass.parents.length > 1 || lastTree === null) {
      lastTree = pass;
      drawTree(at("tree"), pass.parents, pass.path);
    }
    report(message.pieces, pass);
  }
  const log = at("log"), isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 60;
  log.querySelector("article:last-child .text")?.append(span(piece, message.pieces.length - 1));
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function report(pieces, pass) {
  const tokens = pieces.reduce((sum, piece) => sum + piece.tokens, 0), seconds = pieces.reduce((sum, piece) => sum + piece.seconds, 0);
  at("per-pass").textContent = (tokens / pieces.length).toFixed(2);
  at("per-token").textContent = tokens ? (seconds / tokens).toFixed(3) : "–";
  at("busy").textContent = `${Math.round(100 * pass.link_busy)} %`;
  at("passes").textContent = String(pieces.length);
}

function say(text) {
  at("status").textContent = text;
}

function colour() {
  document.body.classList.toggle("coloured", at("colours").checked);
  keep("colours", at("colours").checked);
}

function editSettings() {
  const form = at("settings").querySelector("form");
  for (const field of form.querySelectorAll("[name]")) field.value = settings[field.name] ?? "";
  at("settings").showModal();
}

function takeSettings() {
  settings = {};
  for (const field of at("settings").querySelectorAll("[name]")) {
    if (field.value !== "") settings[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  keep("settings", settings);
  findModel();
}

async function findModel() {
  try {
    model = (await get("v1/models", settings.key)).data[0].id;
    at("model").textContent = model;
    say("");
  } catch (error) {
    say(error.message);
  }
}

at("composer").addEventListener("submit", send);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => event.key === "Escape" && !at("settings").open && running?.abort());
at("stop").addEventListener("click", () => running?.abort());
at("new").addEventListener("click", () => choose(null));
at("open-settings").addEventListener("click", editSettings);
at("settings").addEventListener("close", takeSettings);
at("colours").addEventListener("change", colour);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => lastTree && drawTree(at("tree"), lastTree.parents, lastTree.path));
at("colours").checked = kept("colours", true);
colour();
show();
findModel();
