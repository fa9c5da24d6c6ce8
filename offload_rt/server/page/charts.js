// Charts of passes: the busy share of the link, and the draft tree.

/** Adapt a canvas to the screen. Returns null for a hidden canvas. */
function prepared(canvas) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width) return null;
  Object.assign(canvas, { width: width * scale, height: height * scale });
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { pen, width, height, style: getComputedStyle(canvas) };
}

/** Draw the last passes into a canvas, one bar per pass. `shares` are numbers from 0 to 1. */
export function drawLink(canvas, shares) {
  const { pen, width, height, style } = prepared(canvas) ?? {};
  if (!pen) return;
  const shown = shares.slice(-Math.floor(width / 4)), step = width / Math.max(shown.length, 24);
  pen.fillStyle = style.getPropertyValue("--line");
  pen.fillRect(0, height - 1, width, 1);
  pen.fillStyle = style.getPropertyValue("--accent");
  shown.forEach((share, i) => pen.fillRect(i * step, height * (1 - share), Math.max(step - 1, 1), height * share));
  const mean = shares.reduce((sum, share) => sum + share, 0) / (shares.length || 1);
  canvas.setAttribute("aria-label", `link busy ${Math.round(100 * mean)} % of ${shares.length} passes`);
}

/**
 * Draw a tree into a canvas: levels from left to right, the accepted path in the accent colour.
 * `parents` holds -1 for the root, `path` the accepted nodes.
 */
export function drawTree(canvas, parents, path) {
  const { pen, width, height, style } = prepared(canvas) ?? {};
  if (!pen) return;
  const accent = style.getPropertyValue("--accent"), plain = style.getPropertyValue("--node");
  const spots = places(parents), taken = new Set([0, ...path]);
  const x = (node) => 8 + spots[node].level * (width - 16), y = (node) => 8 + spots[node].row * (height - 16);
  const radius = Math.max(1.5, Math.min(5, 60 / Math.sqrt(parents.length)));
  for (const isTaken of [false, true]) {  // draw the accepted path last
    pen.strokeStyle = pen.fillStyle = isTaken ? accent : plain;
    pen.lineWidth = isTaken ? 2 : 0.7;
    parents.forEach((parent, node) => {
      if (taken.has(node) !== isTaken) return;
      if (parent >= 0) {
        pen.beginPath();
        pen.moveTo(x(parent), y(parent));
        pen.lineTo(x(node), y(node));
        pen.stroke();
      }
      pen.beginPath();
      pen.arc(x(node), y(node), radius, 0, 2 * Math.PI);
      pen.fill();
    });
  }
  canvas.setAttribute("aria-label", `${parents.length} nodes, ${path.length} of them accepted after the root`);
}

/** Compute level and row of each node, from 0 to 1. A row is the mean of its children's rows. */
function places(parents) {
  const children = parents.map(() => []), level = [];
  parents.forEach((parent, node) => {
    level[node] = parent < 0 ? 0 : level[parent] + 1;
    if (parent >= 0) children[parent].push(node);
  });
  const rows = [], order = [0];
  for (let i = 0; i < order.length; i++) order.push(...children[order[i]]);
  const nLeaves = children.filter((some) => !some.length).length, deepest = Math.max(...level, 1);
  let nPlaced = 0;
  const leaves = (node) => (children[node].length ? children[node].forEach(leaves) : (rows[node] = (nPlaced++ + 0.5) / nLeaves));
  leaves(0);
  for (const node of order.reverse()) {
    if (children[node].length) rows[node] = children[node].reduce((sum, child) => sum + rows[child], 0) / children[node].length;
  }
  return parents.map((_, node) => ({ level: level[node] / deepest, row: rows[node] }));
}
