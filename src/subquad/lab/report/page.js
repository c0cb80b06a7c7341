"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const state = { hidden: new Set(), figures: {} };
  let stored = null;
  try { stored = localStorage.getItem("subquad-theme"); } catch { /* private windows on file:// may refuse it */ }
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;
  else root.dataset.theme = system.matches ? "dark" : "light";

  const dark = () => root.dataset.theme === "dark";
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const style = (key) => data.styles[key];
  const colour = (key) => style(key)[dark() ? "dark" : "light"];
  const narrow = () => innerWidth < 760;
  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "onclick") node.addEventListener("click", value); else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  };

  // A short piece of the line with its dash: the chip is the legend.
  const swatch = (key) => {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 18 10");
    svg.dataset.key = key;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    for (const [n, v] of [["x1", 0], ["x2", 18], ["y1", 5], ["y2", 5], ["stroke-width", 2.6]]) line.setAttribute(n, v);
    const dash = { dash: "5 3", dot: "2 2.4" }[style(key).dash];
    if (dash) line.setAttribute("stroke-dasharray", dash);
    svg.append(line);
    if (style(key).dash === "solid") {
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      for (const [n, v] of [["cx", 9], ["cy", 5], ["r", 3.6]]) dot.setAttribute(n, v);
      svg.append(dot);
    }
    return svg;
  };
  const paintSwatches = () => {
    for (const svg of document.querySelectorAll("svg[data-key]")) {
      for (const part of svg.children) {
        part.setAttribute("stroke", colour(svg.dataset.key));
        part.setAttribute("fill", part.tagName === "circle" ? colour(svg.dataset.key) : "none");
      }
    }
  };

  const number = (x) => {
    if (x === 0) return "0";
    if (Math.abs(x) >= 1000) return x.toLocaleString("en", { maximumSignificantDigits: 4 });
    return String(Number(x.toPrecision(3)));
  };
  const shortNumber = (x) => (x >= 1024 && x % 1024 === 0 ? `${x / 1024}k` : number(x));

  const shown = (figure) => {
    const { choice, off } = state.figures[figure.id];
    return figure.lines.filter((line) =>
      !state.hidden.has(line.filter) && !off.has(line.key) &&
      Object.entries(line.choice).every(([name, value]) => !(name in choice) || choice[name] === value));
  };

  const extent = (values, log) => {
    let low = Math.min(...values), high = Math.max(...values);
    if (log) {
      low = Math.log10(low); high = Math.log10(high);
      const pad = Math.max(0.06 * (high - low), 0.08);
      return [low - pad, high + pad];
    }
    return [Math.min(0, low), high * 1.05 || 1];
  };

  // Names at the ends of the lines, pushed apart: nobody has to look back and forth between lines and a legend.
  const labels = (lines, yRange, log, height) => {
    const ends = [];
    for (const line of lines) {
      const last = line.y.findLastIndex((y) => y !== null);
      if (last < 0) continue;
      const y = log ? Math.log10(line.y[last]) : line.y[last];
      ends.push({ line, at: (y - yRange[0]) / (yRange[1] - yRange[0]) });
    }
    ends.sort((a, b) => a.at - b.at);
    const gap = Math.min(15 / height, 0.98 / Math.max(1, ends.length));
    ends.forEach((end, i) => { end.put = i ? Math.max(end.at, ends[i - 1].put + gap) : end.at; });
    let top = 1;
    for (const end of [...ends].reverse()) { end.put = Math.min(end.put, top); top = end.put - gap; }
    return ends.map(({ line, put }) => ({
      text: line.label, x: 1, xref: "paper", xanchor: "left", xshift: 8, y: put, yref: "paper", yanchor: "middle",
      showarrow: false, font: { size: 12, color: colour(line.key) },
    }));
  };

  const draw = (figure) => {
    const { choice, linear } = state.figures[figure.id];
    const place = document.getElementById(`plot-${figure.id}`);
    const lines = shown(figure).filter((line) => line.y.some((y) => y !== null));
    place.classList.toggle("empty", !lines.length);
    if (!lines.length) {
      Plotly.purge(place);
      place.textContent = figure.lines.length
        ? "Nothing to show: every line of this figure is switched off or was not measured."
        : "Not measured.";
      return;
    }
    if (!place.classList.contains("js-plotly-plot")) place.textContent = "";
    const xLog = figure.x_log && !linear, yLog = figure.y_log && !linear;
    const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const ys = lines.flatMap((line) => line.y).filter((y) => y !== null);
    const xRange = extent(xs, xLog), yRange = extent(ys, yLog);
    if (xLog && xs.length > 1) {
      const pad = 0.02 * (Math.log10(xs.at(-1)) - Math.log10(xs[0])) + 0.02;
      xRange[0] = Math.log10(xs[0]) - pad; xRange[1] = Math.log10(xs.at(-1)) + pad;
    }
    if (figure.y_title.startsWith("%")) yRange[1] = 102;
    const most = figure.y_max === null ? Infinity : yLog ? Math.log10(figure.y_max) : figure.y_max;
    const clipped = yRange[1] > most;
    if (clipped) yRange[1] = most;
    const small = narrow();
    const traces = lines.map((line) => ({
      type: "scatter", name: line.label, x: line.x, y: line.y, customdata: line.notes.length ? line.notes : undefined,
      mode: line.flat ? "lines" : figure.points ? "markers" : line.x.length > 12 ? "lines" : "lines+markers", connectgaps: true, cliponaxis: clipped,
      line: { color: colour(line.key), width: line.key === "softmax" ? 3 : 2, dash: line.flat && style(line.key).dash === "solid" ? "dash" : style(line.key).dash },
      marker: { color: colour(line.key), symbol: style(line.key).symbol, size: figure.points ? 10 : small ? 5 : 7, line: { width: 1.4, color: colour(line.key) } },
      hovertemplate: line.flat
        ? `<b>${line.label}</b><br>%{y:.3~g}<extra></extra>`
        : `<b>${line.label}</b>${figure.points ? "" : `<br>%{x:,.4~g} ${figure.x_title}`}<br>${line.notes.length ? "%{customdata}" : "%{y:.3~g}"}<extra></extra>`,
    }));
    const axis = {
      color: css("--soft"), gridcolor: css("--grid"), linecolor: css("--rule"), zeroline: false, tickfont: { size: 12 },
      ticks: "", automargin: true, fixedrange: small,
    };
    const few = xs.length <= 9 && xLog && xs.every((x) => Number.isInteger(x));
    const every = small && xs.length > 5 ? 2 : 1;
    const height = place.clientHeight || 400;
    const right = small || figure.legend ? 16 : 14 + 6.6 * Math.max(...lines.map((line) => line.label.length));
    const decades = yRange[1] - yRange[0];
    const title = figure.y_titles[choice.show] || figure.y_title;
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
      font: { family: css("--sans"), color: css("--ink"), size: 13 }, height,
      margin: { l: 48, r: figure.points ? 14 : right, t: 30, b: 46 },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--rule"), font: { color: css("--ink"), size: 13 }, align: "left" },
      xaxis: { ...axis, type: xLog ? "log" : "linear", range: xRange, title: { text: figure.x_title, font: { size: 13 } }, showgrid: false,
        ...(few ? { tickvals: xs.filter((_, i) => (xs.length - 1 - i) % every === 0), ticktext: xs.filter((_, i) => (xs.length - 1 - i) % every === 0).map(shortNumber) } : xLog ? { dtick: xRange[1] - xRange[0] > 1.8 ? 1 : "D2", tickformat: "~g" } : xs.at(-1) <= 60 && xs.every((x) => Number.isInteger(x)) ? { dtick: Math.ceil((xs.at(-1) + 1) / 12), tickformat: "d", range: [xs[0] - 0.3, xs.at(-1) + 0.3] } : { tickformat: "~s" }) },
      yaxis: { ...axis, type: yLog ? "log" : "linear", range: yRange, tickformat: yLog ? "~g" : "~s",
        ...(yLog ? { dtick: decades > 2.2 ? Math.max(1, Math.ceil(decades / 9)) : decades > 0.7 ? "D2" : "D1" } : {}) },
      annotations: [
        { text: title, x: 0, xref: "paper", xanchor: "left", xshift: -44, y: 1, yref: "paper", yanchor: "bottom", yshift: 8,
          showarrow: false, font: { size: 13, color: css("--soft") } },
        ...(small || figure.points || figure.legend ? [] : labels(lines, yRange, yLog, height - 76)),
      ],
      shapes: choice.show === "gain" ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: css("--soft"), width: 1, dash: "dot" } }] : [],
    };
    Plotly.react(place, traces, layout, { displayModeBar: false, responsive: true });
  };
  const drawAll = () => { paintSwatches(); data.figures.forEach(draw); };

  const press = (buttons, chosen) => buttons.forEach((b) => b.setAttribute("aria-pressed", String(b === chosen)));
  const segment = (title, options, start, choose) => {
    const buttons = options.map(([value, words]) => make("button", { type: "button", "data-value": value }, words));
    buttons.forEach((button, i) => button.addEventListener("click", () => { press(buttons, button); choose(options[i][0]); }));
    press(buttons, buttons[options.findIndex(([value]) => value === start)]);
    return make("span", { class: "segment", role: "group", "aria-label": title }, ...buttons);
  };
  const dropdown = (selector, choose) => {
    const select = make("select", { "data-name": selector.name });
    for (const [value, words] of selector.options) select.append(make("option", { value }, words));
    select.addEventListener("change", () => choose(select.value));
    return make("label", {}, selector.title, select);
  };

  const numbers = (figure, box) => {
    const lines = shown(figure);
    const xs = [...new Set(lines.filter((l) => !l.flat).flatMap((line) => line.x))].sort((a, b) => a - b);
    const head = make("tr", {}, make("th", {}, figure.x_title), ...xs.map((x) => make("th", {}, number(x))));
    const rows = lines.map((line) => make("tr", {}, make("td", {}, line.label), ...xs.map((x) => {
      const i = line.flat ? 0 : line.x.indexOf(x);
      return make("td", {}, i < 0 || line.y[i] === null ? "–" : number(line.y[i]));
    })));
    box.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  };

  const setUp = (figure) => {
    const mine = { choice: {}, linear: false, off: new Set() };
    state.figures[figure.id] = mine;
    const controls = document.querySelector(`#figure-${figure.id} .controls`);
    for (const selector of figure.selectors) {
      mine.choice[selector.name] = selector.options[0][0];
      if (selector.options.length < 2) continue;
      const choose = (value) => { mine.choice[selector.name] = value; draw(figure); };
      const length = selector.options.map(([, words]) => words).join("").length;
      controls.append(selector.options.length <= 3 && length < 60 && !narrow()
        ? segment(selector.title, selector.options, selector.options[0][0], choose) : dropdown(selector, choose));
    }
    if (figure.x_log || figure.y_log) {
      const axes = segment("Axes", [["log", "log"], ["linear", "linear"]], "log", (value) => { mine.linear = value === "linear"; draw(figure); });
      axes.classList.add("axes");
      document.querySelector(`#figure-${figure.id} .head`).append(axes);
    }
    const legend = document.querySelector(`#figure-${figure.id} .legend`);
    if (figure.legend) {
      const words = new Map(figure.lines.map((line) => [line.key, line.label]));
      for (const [key, label] of words) {
        const chip = make("button", { type: "button", class: "chip", "aria-pressed": "true", "data-key": key }, swatch(key), label);
        chip.addEventListener("click", () => {
          if (!mine.off.delete(key)) mine.off.add(key);
          chip.setAttribute("aria-pressed", String(!mine.off.has(key)));
          draw(figure);
        });
        legend.append(chip);
      }
    }
    const details = document.querySelector(`#figure-${figure.id} details`);
    details.addEventListener("toggle", () => { if (details.open) numbers(figure, details.querySelector(".scroll")); });
  };

  const chips = document.getElementById("chips");
  const pressed = () => chips.querySelectorAll("button").forEach((chip) => chip.setAttribute("aria-pressed", String(!state.hidden.has(chip.dataset.key))));
  for (const name of data.mechanisms) {
    const chip = make("button", { type: "button", class: "chip", "aria-pressed": "true", "data-key": name }, swatch(name), name);
    chip.addEventListener("click", () => { if (!state.hidden.delete(name)) state.hidden.add(name); pressed(); drawAll(); });
    chips.append(chip);
  }
  document.getElementById("all").addEventListener("click", () => { state.hidden.clear(); pressed(); drawAll(); });
  document.getElementById("none").addEventListener("click", () => { data.mechanisms.forEach((name) => state.hidden.add(name)); pressed(); drawAll(); });
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("subquad-theme", root.dataset.theme); } catch { /* see above */ }
    drawAll();
  });
  system.addEventListener("change", () => { root.dataset.theme = system.matches ? "dark" : "light"; drawAll(); });

  for (const tabs of document.querySelectorAll(".tabs")) {
    const buttons = [...tabs.querySelectorAll("button")];
    buttons.forEach((button) => button.addEventListener("click", () => {
      press(buttons, button);
      buttons.forEach((b) => { document.getElementById(b.dataset.table).hidden = b !== button; });
    }));
  }

  data.figures.forEach(setUp);
  drawAll();
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 150);
  });
  root.dataset.ready = "true";
})();
