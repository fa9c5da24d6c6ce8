// Files and images of messages: {name, text}, or {name, image, size} with the id of a stored image.
import * as images from "./images.js";
import { newId } from "./store.js";

const MOST_ATTACHED = 256 * 1024;  // bytes of one text file
const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** Bytes of the images of messages in a request. */
export const imageBytes = (files) => files.reduce((total, file) => total + (file.size ?? 0), 0);

/** Read a file. `card` describes the model, `before` are the files of the request so far. Throws an Error with a sentence. */
export async function read(file, card, before) {
  if (TYPES.includes(file.type)) return readImage(file, card, before);
  if (file.size > MOST_ATTACHED) throw new Error(`${file.name} has ${file.size} bytes; at most ${MOST_ATTACHED} can be attached`);
  const text = await file.text();
  if (text.includes("\0") || text.includes("\uFFFD")) throw new Error(`${file.name} is no text in UTF-8 and no PNG, JPEG, WebP or GIF image`);
  return { name: file.name, text };
}

async function readImage(file, card, before) {
  if (!card.input_modalities?.includes("image")) throw new Error(`${card.id} reads text only; ${file.name} is an image`);
  const size = Math.ceil((file.size * 4) / 3) + 64;
  const total = size + imageBytes(before);
  if (total > card.max_body) throw new Error(`With ${file.name}, a request has ${total} bytes; the server accepts ${card.max_body}`);
  const reader = new FileReader();
  const url = await new Promise((resolve, reject) => {
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
  const image = newId();
  await images.put(image, url);
  return { name: file.name || "image", image, size };
}

/** Content of a message in a request: images first, then the text with its files. */
export async function contentOf({ content, attached = [] }) {
  const text = withFiles(content, attached.filter((file) => !file.image));
  const urls = await Promise.all(attached.filter((file) => file.image).map((file) => images.get(file.image)));
  const parts = urls.filter(Boolean).map((url) => ({ type: "image_url", image_url: { url } }));
  return parts.length ? [...parts, ...(text ? [{ type: "text", text }] : [])] : text;
}

// A fence longer than any in the file keeps the file in one block.
function withFiles(content, files) {
  const fence = (text) => "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
  return [content, ...files.map(({ name, text }) => `${name}:\n${fence(text)}\n${text}\n${fence(text)}`)].filter(Boolean).join("\n\n");
}

const files = (conversations) => conversations.flatMap(({ nodes }) => Object.values(nodes).flatMap((node) => node.attached ?? []));

/** Ids of the images of conversations. */
export const imagesOf = (conversations) => files(conversations).flatMap((file) => file.image ?? []);

/** Data URLs of the images of conversations by id. */
export async function exported(conversations) {
  const ids = [...new Set(imagesOf(conversations))];
  return Object.fromEntries(await Promise.all(ids.map(async (id) => [id, await images.get(id)])));
}

/** Store the images of imported conversations under new ids. */
export async function adopt(conversations, urls) {
  for (const file of files(conversations)) {
    const url = urls[file.image];
    if (!file.image) continue;
    file.image = newId();
    if (/^data:image\/(png|jpeg|webp|gif);base64,/.test(url)) await images.put(file.image, url);
  }
}
