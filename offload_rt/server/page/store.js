// Conversations in browser storage. Each conversation is a tree of messages: editing a message or
// regenerating an answer adds a sibling, and `leaf` is the end of the displayed branch.

const read = (name, otherwise) => JSON.parse(localStorage.getItem(name) ?? "null") ?? otherwise;

export const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

/** Read a value of browser storage. */
export const load = read;

/** Write a value to browser storage. Throws a QuotaExceededError when the storage is full. */
export const keep = (name, value) => localStorage.setItem(name, JSON.stringify(value));

/** Read all conversations, newest first, including those of the first version of this page. */
export function loadConversations() {
  const conversations = read("conversations", null);
  if (conversations) return conversations.map(withoutRunning);
  return read("chats", []).map(({ id, title, messages }) => {
    const conversation = newConversation(title, {});
    conversation.id = id;
    for (const message of messages) append(conversation, conversation.leaf, message);
    return conversation;
  });
}

/** Drop empty answers of requests that ended with the last page. */
function withoutRunning(conversation) {
  const last = conversation.nodes[conversation.leaf];
  if (last?.role === "assistant" && !last.content && !last.reasoning) removeLeaf(conversation);
  return conversation;
}

export function newConversation(title, settings) {
  return { id: newId(), title, settings, nodes: {}, leaf: null };
}

/** Add a message below `parent` (null: the start) and display its branch. Returns the message. */
export function append(conversation, parent, message) {
  const node = { ...message, id: newId(), parent };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  return node;
}

/** Remove the last message of the displayed branch. */
export function removeLeaf(conversation) {
  const { parent } = conversation.nodes[conversation.leaf];
  delete conversation.nodes[conversation.leaf];
  conversation.leaf = parent;
}

/** Messages from the start to `leaf`. */
export function branch(conversation, leaf = conversation.leaf) {
  const messages = [];
  for (let id = leaf; id !== null; id = conversation.nodes[id].parent) messages.unshift(conversation.nodes[id]);
  return messages;
}

/** Messages with the same parent, oldest first. */
export function siblings(conversation, message) {
  return Object.values(conversation.nodes).filter((node) => node.parent === message.parent);
}

/** Display the branch of a message, down to its newest descendant. */
export function display(conversation, message) {
  let { id } = message;
  for (let child = message; child; child = Object.values(conversation.nodes).filter((node) => node.parent === id).at(-1)) id = child.id;
  conversation.leaf = id;
}

/** Whether the title or a message contains a text, ignoring case. */
export function matches(conversation, text) {
  const wanted = text.toLowerCase();
  const texts = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.content)];
  return texts.some((value) => value.toLowerCase().includes(wanted));
}

/** Check imported conversations and give them new ids. Also return their images by id. Throws an Error for a file of another kind. */
export function imported(text) {
  let conversations = null, images = {};
  try {
    ({ conversations, images = {} } = JSON.parse(text));
  } catch { /* reported below */ }
  const isFile = (file) => typeof file?.name === "string" && typeof (file.text ?? file.image) === "string";
  const isNode = (node) => typeof node?.content === "string" && ["user", "assistant"].includes(node.role) && (node.attached ?? []).every(isFile);
  const isConversation = ({ title, nodes, leaf }) =>
    typeof title === "string" && Object.values(nodes ?? {}).every(isNode) && (leaf === null || leaf in nodes)
    && Object.entries(nodes).every(([id, node]) => node.id === id && (node.parent === null || node.parent in nodes));
  if (!Array.isArray(conversations) || !conversations.every(isConversation)) {
    throw new Error("The file contains no conversations of this page; choose a file of Export");
  }
  return { images, conversations: conversations.map(({ title, nodes, leaf, settings }) => ({ id: newId(), title, nodes, leaf, settings: settings ?? {} })) };
}
