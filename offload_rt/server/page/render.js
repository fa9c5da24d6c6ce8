// Markdown with highlighted code, coloured by the pass that produced each part.
import DOMPurify from "./vendor/purify.js";
import hljs from "./vendor/highlight.js";
import { marked } from "./vendor/marked.js";

// The start of pass n is marked by code point FIRST + n, from a private plane of Unicode.
const FIRST = 0xF0000;
const MARKS = /[\u{F0000}-\u{FFFFD}]/gu;

/** Render the text of a message. `pieces` are the passes {text, tokens, seconds} of an answer. */
export function render(text, pieces = []) {
  const fragment = DOMPurify.sanitize(marked.parse(mark(text, pieces), { breaks: true }), { RETURN_DOM_FRAGMENT: true });
  for (const link of fragment.querySelectorAll("a[href]")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  let pass = 0;
  const walker = document.createTreeWalker(fragment, NodeFilter.SHOW_TEXT);
  const blocks = new Set(fragment.querySelectorAll("pre > code"));
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (const node of nodes) {
    if (blocks.has(node.parentNode)) pass = renderCode(node.parentNode, pass, pieces);
    else pass = colour(node, parts(node.data, pass), pieces);
  }
  return fragment;
}

/** Insert a mark where each pass begins, moved on to a place that has no meaning in Markdown. */
function mark(text, pieces) {
  const plain = text.replace(MARKS, "");
  let marked = "", done = 0, offset = 0;
  pieces.forEach((piece, n) => {
    const at = n && place(plain, Math.max(offset, done), offset + piece.text.length);
    offset += piece.text.length;
    if (!at) return;
    marked += plain.slice(done, at) + String.fromCodePoint(FIRST + n);
    done = at;
  });
  return marked + plain.slice(done);
}

/** First offset from `start` to `end` inside words or before a word; 0: none. */
function place(text, start, end) {
  for (let at = Math.max(start, 1); at < end; at++) {
    if (!/[\p{L}\p{N} ]/u.test(text[at - 1]) || !/\p{L}/u.test(text[at])) continue;
    const line = text.slice(text.lastIndexOf("\n", at - 1) + 1, at);
    const isInfo = /^\s*(```|~~~)/.test(line), isTag = /<[a-z/!][^>]*$/i.test(line), isLink = /(:\/\/|\]\(|&)\S*$/.test(line);
    if (!isInfo && !isTag && !isLink) return at;
  }
  return 0;
}

/** Split marked text into [pass, text] pairs. */
function parts(text, pass) {
  const pairs = [[pass, ""]];
  for (const character of text) {
    const code = character.codePointAt(0);
    if (code >= FIRST && code <= 0xFFFFD) pairs.push([code - FIRST, ""]);
    else pairs.at(-1)[1] += character;
  }
  return pairs;
}

/** Replace a text node by one element per pass. Returns the last pass. */
function colour(node, pairs, pieces) {
  const isBetweenBlocks = !node.data.trim() && !node.parentNode.closest?.("p, li, td, th, pre, h1, h2, h3, h4, h5, h6");
  if (pieces.length && !isBetweenBlocks) node.replaceWith(...pairs.filter(([, text]) => text).map(([pass, text]) => span(text, pass, pieces[pass])));
  return pairs.at(-1)[0];
}

function span(text, n, piece) {
  const made = document.createElement("span");
  const tokens = `${piece.tokens} ${piece.tokens === 1 ? "token" : "tokens"}`;
  return Object.assign(made, { className: `pass pass-${n % 4}`, title: `pass ${n + 1}: ${tokens} in ${piece.seconds.toFixed(2)} s`, textContent: text });
}

/** Highlight a block of code, colour it by pass, and add a copy button. Returns the last pass. */
function renderCode(code, pass, pieces) {
  const pairs = parts(code.textContent, pass);
  const text = pairs.map(([, part]) => part).join("");
  const language = /language-(\S+)/.exec(code.className)?.[1];
  const result = hljs.getLanguage(language) ? hljs.highlight(text, { language }) : hljs.highlightAuto(text);
  code.replaceChildren(DOMPurify.sanitize(result.value, { RETURN_DOM_FRAGMENT: true }));
  const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT), nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  const rest = pairs.slice();
  for (const node of nodes) colour(node, cut(rest, node.data.length), pieces);
  const copy = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: "Copy" });
  copy.dataset.text = text;
  code.parentNode.prepend(copy);
  return pairs.at(-1)[0];
}

/** Remove the first `length` characters from [pass, text] pairs and return them as pairs. */
function cut(pairs, length) {
  const taken = [];
  while (length > 0) {
    const [pass, text] = pairs[0];
    taken.push([pass, text.slice(0, length)]);
    length -= taken.at(-1)[1].length;
    if (text.length === taken.at(-1)[1].length && pairs.length > 1) pairs.shift();
    else pairs[0] = [pass, text.slice(taken.at(-1)[1].length)];
  }
  return taken;
}
