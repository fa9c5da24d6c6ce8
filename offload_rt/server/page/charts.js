// Share of each pass in which the link was busy, as one bar per pass.

/** Draw the last passes into a canvas. `shares` are numbers from 0 to 1. */
export function drawLink(canvas, shares) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (!width) return;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d"), style = getComputedStyle(canvas);
  pen.scale(scale, scale);
  const shown = shares.slice(-Math.floor(width / 4)), step = width / Math.max(shown.length, 24);
  pen.fillStyle = style.getPropertyValue("--line");
  pen.fillRect(0, height - 1, width, 1);
  pen.fillStyle = style.getPropertyValue("--accent");
  shown.forEach((share, i) => pen.fillRect(i * step, height * (1 - share), Math.max(step - 1, 1), height * share));
  const mean = shares.reduce((sum, share) => sum + share, 0) / (shares.length || 1);
  canvas.setAttribute("aria-label", `link busy ${Math.round(100 * mean)} % of ${shares.length} passes`);
}
