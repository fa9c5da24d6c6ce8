// Images of messages as data URLs in IndexedDB: the storage of conversations holds 5 MB only.

const cache = new Map();
let opened = null;

/** Wait for a request of IndexedDB. */
const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function table(mode) {
  if (!opened) {
    const request = indexedDB.open("offload_rt", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("images");
    opened = result(request);
  }
  return (await opened).transaction("images", mode).objectStore("images");
}

/** Store an image. Throws an Error when the browser's storage is full or disabled. */
export async function put(id, url) {
  await result((await table("readwrite")).put(url, id));
  cache.set(id, url);
}

/** Return the data URL of an image; undefined if it was deleted. */
export async function get(id) {
  if (!cache.has(id)) cache.set(id, await result((await table("readonly")).get(id)));
  return cache.get(id);
}

export async function remove(ids) {
  const images = await table("readwrite");
  for (const id of ids) {
    cache.delete(id);
    images.delete(id);
  }
}

/** Make an element that shows an image. */
export function picture({ name, image }) {
  const made = Object.assign(document.createElement("img"), { alt: name, title: name });
  if (cache.has(image)) made.src = cache.get(image) ?? "";
  else get(image).then((url) => (url ? (made.src = url) : (made.alt = `${name} (deleted)`)));
  return made;
}
