// Web page: conversations, their answers, and the passes that produced the answers.
import { complete, get } from "./api.js";
import * as attachments from "./attachments.js";
import { drawLink, drawTree } from "./charts.js";
import * as images from "./images.js";
import { render } from "./render.js";
import * as store from "./store.js";

const at = (id) => document.getElementById(id);

let conversations = store.loadConversations();
let openId = store.load("open", null);
let defaults = store.load("defaults", {});
let key = store.load("key", "");
let card = { id: "" };  // the model's description
let cardRead;  // promise of it
let attached = [];  // files of the next message
let editing = null;  // id of the edited message
let lastTree = null;  // last pass with more than a root
const running = new Map();  // conversation id -> AbortController of its answer
const pending = new Set();  // answers to redraw with the next frame

const open = () => conversations.find((conversation) => conversation.id === openId);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const button = (textContent, onclick, properties = {}) => element("button", { type: "button", textContent, onclick, ...properties });

function save() {
  try {
    store.keep("conversations", conversations);
    store.keep("open", openId);
  } catch {
    report("The browser's storage is full; export conversations and delete some");
  }
}

function report(text) {
  at("status").textContent = text;
}

// Drawing

function show() {
  showList();
  const messages = open() ? store.branch(open()) : [];
  const log = at("log");
  log.replaceChildren(...messages.map(article));
  log.scrollTop = log.scrollHeight;
  const isRunning = running.has(openId);
  at("send").hidden = isRunning;
  at("stop").hidden = !isRunning;
  showStatistics(messages.findLast((message) => message.pieces?.length)?.pieces ?? []);
}

function showList() {
  const found = conversations.filter((conversation) => store.matches(conversation, at("search").value.trim()));
  at("chats").replaceChildren(...found.map((conversation) => {
    const { id, title } = conversation;
    const shown = running.has(id) ? `… ${title}` : title;
    const select = button(shown, () => choose(id), { className: "open", ariaCurrent: String(id === openId) });
    const rename = button("✎", () => renameConversation(conversation), { ariaLabel: `Rename ${title}` });
    const remove = button("×", () => drop(conversation), { ariaLabel: `Delete ${title}` });
    return element("li", {}, select, rename, remove);
  }));
}

function article(message) {
  const whole = element("article", { className: message.role, id: `message-${message.id}` });
  whole.append(element("h3", { textContent: message.role === "user" ? "You" : "Model" }));
  if (message.id === editing) return whole.append(editor(message)), whole;
  if (message.reasoning) {
    const reasoning = element("details", { className: "reasoning", open: !message.content }, element("summary", { textContent: "Reasoning" }));
    reasoning.append(element("div", { className: "text" }, render(message.reasoning)));
    whole.append(reasoning);
  }
  const files = message.attached ?? [], pictures = files.filter((file) => file.image);
  if (pictures.length) whole.append(element("div", { className: "pictures" }, ...pictures.map(images.picture)));
  if (message.content || !pictures.length) whole.append(element("div", { className: "text" }, render(message.content, message.pieces)));
  for (const { name, text } of files.filter((file) => !file.image)) {
    whole.append(element("details", { className: "file" }, element("summary", { textContent: name }), element("pre", { textContent: text })));
  }
  whole.append(actions(message));
  return whole;
}

function actions(message) {
  const row = element("div", { className: "actions" });
  const versions = store.siblings(open(), message), n = versions.indexOf(message);
  const isRunning = running.has(openId);
  if (versions.length > 1) {
    const turn = (step) => () => {
      store.display(open(), versions[n + step]);
      save();
      show();
      at(`message-${versions[n + step].id}`).querySelector(".actions button:enabled").focus();
    };
    const back = button("‹", turn(-1), { disabled: n === 0 || isRunning, ariaLabel: "Previous version" });
    const on = button("›", turn(1), { disabled: n === versions.length - 1 || isRunning, ariaLabel: "Next version" });
    row.append(back, element("span", { className: "version", textContent: `${n + 1}/${versions.length}` }), on);
  }
  row.append(button("Copy", (event) => copy(message.content, event.target)));
  if (isRunning) return row;
  if (message.role === "user") row.append(button("Edit", () => edit(message.id)));
  else row.append(button("Regenerate", () => answer(open(), message.parent), { className: "regenerate" }));
  return row;
}

function editor(message) {
  const area = element("textarea", { value: message.content, rows: 4, id: "edited", ariaLabel: "Edited message" });
  const done = () => {
    const content = area.value.trim();
    if (!content && !message.attached) return;
    editing = null;
    const changed = store.append(open(), message.parent, { role: "user", content, attached: message.attached });
    answer(open(), changed.id);
  };
  area.addEventListener("keydown", (event) => event.key === "Escape" && edit(null));
  return element("div", {}, area, element("div", { className: "actions" }, button("Send", done), button("Cancel", () => edit(null))));
}

function redraw(message) {
  pending.add(message);
  if (pending.size > 1) return;
  requestAnimationFrame(() => {
    const log = at("log"), isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 80;
    for (const changed of pending) document.getElementById(`message-${changed.id}`)?.replaceWith(article(changed));
    pending.clear();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  });
}

function showStatistics(pieces) {
  const passes = pieces.filter((piece) => piece.tokens);
  const sum = (name) => passes.reduce((total, piece) => total + piece[name], 0);
  const tokens = sum("tokens"), seconds = sum("seconds"), busy = passes.map((piece) => piece.busy ?? 0);
  const busySeconds = passes.reduce((total, piece) => total + (piece.busy ?? 0) * piece.seconds, 0);
  const speed = seconds ? tokens / seconds : 0, rate = speed.toFixed(speed < 10 ? 2 : 0), perPass = (tokens / passes.length).toFixed(2);
  const put = (id, text, otherwise = "–") => (at(id).textContent = passes.length ? text : otherwise);
  put("per-second", rate);
  put("per-pass", perPass);
  put("passes", passes.length);
  put("busy", `${(seconds ? (100 * busySeconds) / seconds : 0).toFixed(0)} %`);
  put("rate", `${rate} tokens/s, ${perPass} per pass`, "No answer yet");
  // Trees are not stored with a conversation.
  document.body.classList.toggle("no-tree", !lastTree);
  drawLink(at("link"), busy);
  if (lastTree) drawTree(at("tree"), lastTree.parents, lastTree.path);
}

// Conversations

function choose(id) {
  openId = id;
  editing = null;
  toggleMenu(false);
  report("");
  save();
  show();
  at("prompt").focus();
}

function edit(id) {
  editing = id;
  show();
  (at("edited") ?? at("prompt")).focus();
}

async function drop(conversation) {
  at("confirm-text").textContent = `Delete “${conversation.title}”? This cannot be undone.`;
  if ((await closed(at("confirm"))) !== "yes") return;
  running.get(conversation.id)?.abort();
  conversations = conversations.filter((other) => other !== conversation);
  images.remove(attachments.imagesOf([conversation]));
  choose(openId === conversation.id ? (conversations[0]?.id ?? null) : openId);
}

async function renameConversation(conversation) {
  at("new-title").value = conversation.title;
  if ((await closed(at("rename"))) !== "done") return;
  conversation.title = at("new-title").value.trim() || conversation.title;
  save();
  showList();
  at("prompt").focus();
}

/** Show a dialog until it is closed. Returns its value, "" after Escape. */
function closed(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}

async function exportAll() {
  const text = JSON.stringify({ version: 2, conversations, images: await attachments.exported(conversations) });
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: "conversations.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function importFile(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const { conversations: added, images: urls } = store.imported(await file.text());
    await attachments.adopt(added, urls);
    conversations = [...added, ...conversations];
    choose(added[0]?.id ?? openId);
    report(`Imported ${added.length} ${added.length === 1 ? "conversation" : "conversations"}`);
  } catch (error) {
    report(error.message);
  }
}

// Messages

async function send(event) {
  event?.preventDefault();
  const content = at("prompt").value.trim();
  if ((!content && !attached.length) || running.has(openId)) return;
  if (!open()) {
    const conversation = store.newConversation((content || attached[0].name).slice(0, 60), { ...defaults });
    conversations.unshift(conversation);
    openId = conversation.id;
  }
  const message = store.append(open(), open().leaf, { role: "user", content, ...(attached.length ? { attached } : {}) });
  at("prompt").value = "";
  attached = [];
  showAttached();
  await answer(open(), message.id);
}

/** Stream an answer below a message. The answer continues while another conversation is open. */
async function answer(conversation, parent) {
  const controller = new AbortController();
  const { system, ...sampling } = conversation.settings;
  const asked = store.branch(conversation, parent);
  const message = store.append(conversation, parent, { role: "assistant", content: "", reasoning: "", pieces: [] });
  running.set(conversation.id, controller);
  const isOpen = () => conversation.id === openId;
  report("Reading the prompt");
  show();
  let status = "";
  try {
    const messages = await Promise.all(asked.map(async (turn) => ({ role: turn.role, content: await attachments.contentOf(turn) })));
    if (system) messages.unshift({ role: "system", content: system });
    for await (const chunk of complete({ model: card.id, messages, ...sampling }, key, controller.signal)) {
      for (const choice of chunk.choices) take(message, choice.delta, chunk.pass, isOpen());
      if (chunk.choices.length && isOpen()) report("");
    }
  } catch (error) {
    status = error.name === "AbortError" ? "Stopped" : error.message;
  }
  if (!message.content && !message.reasoning && conversation.leaf === message.id) store.removeLeaf(conversation);
  running.delete(conversation.id);
  save();
  if (!isOpen()) return showList();
  report(status);
  show();
  at("prompt").focus();
}

function take(message, delta, pass, isOpen) {
  const text = delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? "";
  message.content += text;
  if (pass || text) message.pieces.push({ text, tokens: pass?.tokens ?? 0, seconds: pass?.seconds ?? 0, busy: pass?.link_busy ?? 0 });
  if (pass && (pass.parents.length > 1 || lastTree === null)) lastTree = pass;
  if (!isOpen) return;
  redraw(message);
  if (pass) showStatistics(message.pieces);
}

async function attach(files) {
  files = [...files];
  await cardRead;
  report("");
  const sent = open() ? store.branch(open()).flatMap((message) => message.attached ?? []) : [];
  for (const file of files) {
    await attachments.read(file, card, [...sent, ...attached]).then((found) => attached.push(found), (error) => report(error.message));
  }
  showAttached();
}

function detach(file) {
  attached = attached.filter((other) => other !== file);
  if (file.image) images.remove([file.image]);
  showAttached();
  (at("attached").querySelector("button") ?? at("prompt")).focus();
}

function showAttached() {
  at("attached").replaceChildren(...attached.map((file) => {
    const remove = button("×", () => detach(file), { ariaLabel: `Remove ${file.name}` });
    return element("li", {}, ...(file.image ? [images.picture(file)] : []), element("span", { textContent: file.name }), remove);
  }));
}

async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // the clipboard is available on secure origins only
    const area = element("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  pressed.textContent = "Copied";
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

// Settings

async function editSettings() {
  const fields = at("settings").querySelectorAll("[name]");
  const values = open()?.settings ?? defaults;
  at("settings-title").textContent = open() ? "Settings of this conversation" : "Settings of new conversations";
  for (const field of fields) field.value = values[field.name] ?? "";
  at("key").value = key;
  at("as-default").checked = !open();
  at("as-default").disabled = !open();
  if ((await closed(at("settings"))) !== "done") return;
  const settings = {};
  for (const field of fields) {
    if (field.value !== "") settings[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  if (open()) open().settings = settings;
  if (at("as-default").checked) defaults = settings;
  key = at("key").value;
  store.keep("defaults", defaults);
  store.keep("key", key);
  save();
  cardRead = findModel();
}

async function findModel() {
  try {
    [card] = (await get("v1/models", key)).data;
    at("model").textContent = card.id;
    at("attach").title = card.input_modalities?.includes("image") ? "Text files and images" : "Text files; this model reads no images";
    report("");
  } catch (error) {
    report(error.message);
  }
}

function colour() {
  document.body.classList.toggle("coloured", at("colours").checked);
  store.keep("colours", at("colours").checked);
}

function toggleMenu(isOpen) {
  document.body.classList.toggle("menu-open", isOpen);
  at("menu").ariaExpanded = String(isOpen);
  if (isOpen) at("new").focus();
}

// Statistics stand beside the conversation on wide screens and above it, folded, on narrow ones.
const wide = matchMedia("(min-width: 60rem)");
const placeStatistics = () => {
  at("statistics").open = wide.matches;
  show();
};

at("composer").addEventListener("submit", send);
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]") || editing) return;
  if (document.body.classList.contains("menu-open")) (toggleMenu(false), at("menu").focus());
  else running.get(openId)?.abort();
});
document.addEventListener("click", (event) => event.target.matches?.("button.copy") && copy(event.target.dataset.text, event.target));
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => (event.preventDefault(), attach(event.dataTransfer.files)));
at("prompt").addEventListener("paste", (event) => event.clipboardData.files.length && (event.preventDefault(), attach(event.clipboardData.files)));
at("attach").addEventListener("click", () => at("attach-files").click());
at("attach-files").addEventListener("change", async (event) => {
  await attach(event.target.files);
  event.target.value = "";
});
at("stop").addEventListener("click", () => running.get(openId)?.abort());
at("new").addEventListener("click", () => choose(null));
at("menu").addEventListener("click", () => toggleMenu(!document.body.classList.contains("menu-open")));
at("search").addEventListener("input", showList);
at("export").addEventListener("click", exportAll);
at("import").addEventListener("click", () => at("import-file").click());
at("import-file").addEventListener("change", importFile);
at("open-settings").addEventListener("click", editSettings);
at("colours").addEventListener("change", colour);
at("statistics").addEventListener("toggle", () => show());
wide.addEventListener("change", placeStatistics);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
at("colours").checked = store.load("colours", true);
colour();
placeStatistics();
cardRead = findModel();
