// Conversations as trees: an edit or another answer is a sibling, so nothing that was said is lost.
//
// conversation: {id, title, created, updated, settings, head, nodes: {id: node}}
// node: {id, parent, role, content, …}; the path from the root to `head` is what is shown and sent.

/** Return a new id. */
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** Return an empty conversation with these settings. */
export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: structuredClone(settings), head: null, nodes: {} };
}

/** Return the nodes from the root to `last`, by default the conversation's head. */
export function path(conversation, last = conversation.head) {
  const nodes = [];
  for (let id = last; id !== null && conversation.nodes[id]; id = conversation.nodes[id].parent) nodes.push(conversation.nodes[id]);
  return nodes.reverse();
}

/** Add a message after `parent`, which becomes the head; return its node. */
export function add(conversation, message, parent = conversation.head) {
  const node = { id: newId(), parent, ...message };
  conversation.nodes[node.id] = node;
  conversation.head = node.id;
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node);
  return node;
}

/** Return the alternatives of a node, itself among them, oldest first. */
export const siblings = (conversation, node) =>
  Object.values(conversation.nodes).filter((other) => other.parent === node.parent && other.role === node.role);

/** Show the alternative `by` places after a node, with what followed it last. */
export function turnTo(conversation, node, by) {
  const all = siblings(conversation, node);
  const chosen = all[all.indexOf(node) + by];
  if (chosen) conversation.head = newestBelow(conversation, chosen).id;
}

function newestBelow(conversation, node) {
  const children = Object.values(conversation.nodes).filter((other) => other.parent === node.id);
  return children.length ? newestBelow(conversation, children.at(-1)) : node;
}

/** Remove a node without children; its parent becomes the head. */
export function removeLast(conversation, node) {
  delete conversation.nodes[node.id];
  conversation.head = node.parent;
}

/** Return the text of a user's message as the model gets it: the files, then what was typed. */
export const fullText = (node) => (node.files ?? []).map(fileText).join("") + node.content;

/** Return a file as a part of a prompt, fenced by more backticks than it has. */
export function fileText({ name, text }) {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`{3,}/g), (match) => match[0].length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}\n\n`;
}

/** Return the messages of a path as the API takes them. Reasoning goes back with tool calls alone: it led to them. */
export function sentMessages(system, nodes) {
  const messages = nodes.filter((node) => !(node.role === "assistant" && isEmpty(node))).map(sentMessage);
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

const isEmpty = (node) => !node.content && !node.calls?.length;

function sentMessage(node) {
  if (node.role === "user") return { role: "user", content: fullText(node) };
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.content };
  if (!node.calls?.length) return { role: "assistant", content: node.content };
  const calls = node.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const thought = node.reasoning ? { reasoning_content: node.reasoning } : {};
  return { role: "assistant", content: node.content || null, ...thought, tool_calls: calls };
}

function titleOf(node) {
  const text = node.content.trim() || (node.files ?? []).map((file) => file.name).join(", ");
  const line = text.split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** Return a conversation as Markdown. */
export function asMarkdown(conversation) {
  const parts = path(conversation).map((node) => `## ${HEADINGS[node.role]}\n\n${markdownOf(node)}\n`);
  const system = conversation.settings.system;
  return [`# ${conversation.title || "Conversation"}\n`, ...(system ? [`## System\n\n${system}\n`] : []), ...parts].join("\n");
}

const HEADINGS = { user: "User", assistant: "Assistant", tool: "Tool result" };

function markdownOf(node) {
  const calls = (node.calls ?? []).map(({ name, text }) => `Calls \`${name}\`:\n\n\`\`\`json\n${text}\n\`\`\``);
  return [node.role === "user" ? fullText(node) : node.content, ...calls].filter(Boolean).join("\n\n");
}
