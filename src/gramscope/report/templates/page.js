"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  let data = JSON.parse(byId("gramscope-data").textContent);
  const state = { hidden: new Set(), logSteps: data.log_steps, at: {}, open: {}, printing: false };

  // Colours --------------------------------------------------------------------------------------------------------
  const wish = matchMedia("(prefers-color-scheme: dark)");
  const remembered = () => { try { return localStorage.getItem("gramscope-theme"); } catch { return null; } };
  const theme = () => (state.printing ? "light" : remembered() || state.theme || (wish.matches ? "dark" : "light"));
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  // Early to late, or shallow to deep: two ends and a middle for each background, so that every step can be seen.
  const depths = { light: [[158, 188, 218], [75, 110, 190], [66, 10, 104]], dark: [[70, 90, 130], [90, 160, 220], [240, 230, 140]] };
  const dashes = ["solid", "dash", "dot", "dashdot", "longdash"];
  const symbols = ["circle", "square", "diamond", "triangle-up", "x", "cross", "triangle-down", "star"];

  function colour([kind, value]) {
    if (kind === "c") return css(`--c${value % 16}`);
    const ends = depths[root.dataset.theme], place = Math.min(1, Math.max(0, value)) * 2;
    const low = Math.min(1, Math.floor(place)), rest = place - low;
    return `rgb(${ends[low].map((v, i) => Math.round(v + rest * (ends[low + 1][i] - v))).join(",")})`;
  }

  // Sixteen colours, then they come again: another symbol goes with each, open in the second eight.
  const symbol = (place) => symbols[(place + Math.floor(place / 16)) % 8] + (place % 16 > 7 ? "-open" : "");

  // Plotly reads its texts as a small HTML with %{…} inside; names of a run are neither.
  const text = (name) => String(name).replace(/[&<>%$]/g, (c) => `&#${c.charCodeAt(0)};`);
  // A long path of a module keeps all its parts, "ber.enc.lay.0.att.self.query": its number is what tells layers apart.
  const abbreviated = (name) => name.split(".").map((part, at, parts) => (at < parts.length - 2 ? part.slice(0, 3) : part)).join(".");
  const cut = (name) => (name.length > 32 ? `${name.slice(0, 16)}…${name.slice(-14)}` : name);
  const short = (name) => text(name.length > 28 ? cut(abbreviated(name)) : name);

  function matrix(mark) {
    if (!mark.decoded) {
      const [rows, columns] = mark.z.shape, bytes = Uint8Array.from(atob(mark.z.base64), (c) => c.charCodeAt(0));
      const view = new DataView(bytes.buffer), at = (i) => (mark.z.wide ? view.getFloat64(8 * i, true) : view.getFloat32(4 * i, true));
      mark.decoded = Array.from({ length: rows }, (_, r) =>
        Array.from({ length: columns }, (_, c) => { const v = at(r * columns + c); return Number.isFinite(v) ? v : null; }));
    }
    return mark.decoded;
  }

  // From the neutral figure to Plotly ------------------------------------------------------------------------------
  const shown = (mark) => mark.run === null || !state.hidden.has(mark.run);

  // Step 0 of a logarithmic axis stands at half of the first other step of the whole drawing.
  const leastStep = (marks) => marks.reduce((least, mark) => (mark.x || []).reduce((a, v) => (v > 0 && v < a ? v : a), least), Infinity);

  function steps(x, axis, least) {
    if (!(axis.steps && state.logSteps)) return x;
    return x.map((v) => (v > 0 ? v : Number.isFinite(least) ? least / 2 : 1));
  }

  // Plotly leaves out what is near the largest float, without a word; here it is said.
  const most = 1e300;
  const drawable = (v) => v !== null && Math.abs(v) <= most;
  const finite = (mark) => (mark.kind === "heat" ? matrix(mark).flat() : mark.y).filter((v) => v !== null);

  // What stands in the place of a drawing, or beside one that lacks something.
  function remark(plot, marks) {
    if (!marks) return plot.empty;
    const values = marks.filter(shown).flatMap(finite);
    if (!values.length) return marks.some(shown) ? "No finite number to draw." : "";
    if (!values.some(drawable)) return "All numbers are beyond 1e300 and are not drawn; the table has them.";
    return values.every(drawable) ? "" : "Numbers beyond 1e300 are not drawn.";
  }

  function lineTrace(mark, plot, least) {
    const drawn = colour(mark.colour), few = mark.x.length <= 40;
    return {
      type: "scatter", name: short(mark.name), x: steps(mark.x, plot.x, least), y: mark.y.map((v) => (drawable(v) ? v : null)), mode: mark.stacked ? "lines" : mark.mode,
      visible: shown(mark), showlegend: mark.legend, stackgroup: mark.stacked ? "one" : undefined,
      line: { color: drawn, dash: mark.dash, width: mark.stacked ? 1 : 2 },
      fillcolor: mark.stacked ? drawn.replace("rgb(", "rgba(").replace(/\)$/, ",.75)") : undefined,
      marker: { color: drawn, size: mark.mode === "markers" && !few ? 4 : 6, opacity: mark.mode === "markers" && !few ? 0.6 : 1,
        symbol: mark.colour[0] === "c" ? symbol(mark.colour[1]) : symbols[0] },
      hovertemplate: `%{x}: %{y:.4g}<extra>${short(mark.name)}</extra>`, hoverlabel: { namelength: 40 },
    };
  }

  function heatTrace(mark) {
    const z = matrix(mark);
    const label = (r, c) => `${text(mark.rows[r])} · ${text(mark.columns[c])}: ${z[r][c] === null ? "not finite" : Number(z[r][c].toPrecision(4))}`;
    return {
      type: "heatmap", name: short(mark.name), z, text: z.map((row, r) => row.map((_, c) => label(r, c))),
      hovertemplate: "%{text}<extra></extra>", colorscale: "Viridis", zmin: mark.low ?? undefined, zmax: mark.high ?? undefined,
      visible: shown(mark), colorbar: { thickness: 12, outlinewidth: 0, tickfont: { size: 11 } }, hoverongaps: false,
    };
  }

  function groups(names) {
    const found = [];
    names.forEach((name, place) => {
      if (found.length && found[found.length - 1].name === name) found[found.length - 1].end = place;
      else found.push({ name, start: place, end: place });
    });
    return found;
  }

  function ticks(names, most) {
    const found = groups(names), every = Math.ceil(found.length / most);
    const kept = found.filter((_, place) => place % every === 0);
    return { tickmode: "array", tickvals: kept.map((g) => (g.start + g.end) / 2), ticktext: kept.map((g) => short(String(g.name))) };
  }

  function axis(spec) {
    const log = spec.log || (spec.steps && state.logSteps);
    const range = spec.range ? (log ? spec.range.map(Math.log10) : [...spec.range]) : undefined;
    return { title: { text: text(spec.title), font: { size: 12 }, standoff: 8 }, type: log ? "log" : "linear", range, autorange: range ? false : true,
      gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true, tickfont: { size: 11 },
      ...written(log) };
  }

  // How numbers stand at an axis: 1,000 and 0.001 rather than 1e+3 and 1e-3.
  const written = (log) => (log ? { tickformat: ",~g", minorloglabels: "complete" } : { exponentformat: "e", minexponent: 6, separatethousands: true });

  // The least and the largest of the numbers that are shown; a stack adds up, so it is left to Plotly.
  function extent(marks, key) {
    const values = marks.filter((mark) => mark.kind === "line" && shown(mark)).flatMap((mark) => mark[key]).filter(drawable);
    return values.length && !marks.some((mark) => mark.stacked) ? values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [values[0], values[0]]) : null;
  }

  // Plotly draws a constant on an axis from one below to one above it, whatever its size.
  function constant(axis, ends) {
    if (!axis.autorange || !ends || ends[0] !== ends[1] || ends[0] === 0 || (axis.type === "log" && ends[0] < 0)) return {};
    const value = ends[0], air = Math.abs(value) / 2;
    if (axis.type !== "log") return { autorange: false, range: [value - air, value + air] };
    return { autorange: false, range: [Math.log10(value) - 0.31, Math.log10(value) + 0.31], tickmode: "array", tickvals: [value], ticktext: [said(value)] };
  }

  // Labels of a logarithmic axis: powers of ten where there are enough of them, else with 2 and 5 between them. Left to
  // itself Plotly labels all of 0.1, 0.2, ..., 0.9, 1, which overlap. It takes D2 for steps of 0.3 to 0.7 decades.
  function logLabels(axis, spec, values) {
    const positive = axis.type === "log" ? values.filter((v) => v > 0) : [];
    if (!positive.length) return {};
    const [low, high] = positive.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [positive[0], positive[0]]), span = Math.log10(high / low);
    if (spec.whole && high <= 10 && high > low) {
      const places = [1, 2, 3, 5, 7, 10].filter((v) => v >= low && v <= high);
      return { tickmode: "array", tickvals: places, ticktext: places.map(String) };
    }
    const whole = 1.12 * span; // with the air that Plotly leaves
    return { nticks: whole < 1 ? 5 : whole < 2.3 ? Math.floor(whole / 0.35) : Math.min(7, Math.ceil(whole)) };
  }

  // Short runs: there is no step one and a half.
  function wholeSteps(plot, marks) {
    const xs = plot.x.steps ? marks.flatMap((mark) => mark.x || []) : [], high = Math.max(...xs), low = Math.min(...xs);
    // Where the axis labels the place of step 0, half a step, it says 0.
    if (state.logSteps && high > 10) return low <= 0 && Number.isFinite(leastStep(marks)) ? { labelalias: { [leastStep(marks) / 2]: "0" } } : {};
    if (!xs.length || (state.logSteps ? high : high - low) > 10) return {};
    if (!state.logSteps) return { tickmode: "linear", tick0: 0, dtick: 1, ...(high === low ? { autorange: false, range: [low - 1, high + 1] } : {}) };
    const least = Math.min(leastStep(marks), high), places = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10].filter((v) => v >= least && v <= high && (high < 7 || ![4, 6, 8, 9].includes(v)));
    const zero = low <= 0 ? [Number.isFinite(least) && least > 0 ? least / 2 : 1] : [];
    return { tickmode: "array", tickvals: [...zero, ...places], ticktext: [...zero.map(() => "0"), ...places.map(String)] };
  }

  function layout(plot, marks) {
    const heat = marks.find((mark) => mark.kind === "heat"), legend = marks.filter((mark) => mark.legend && shown(mark)).length;
    const x = axis(plot.x), y = axis(plot.y);
    if (heat) {
      Object.assign(x, ticks(heat.columns, 10), { showgrid: false, autorange: true, range: undefined });
      Object.assign(y, ticks(heat.rows, 32), { showgrid: false, autorange: "reversed", range: undefined });
      if (plot.square) Object.assign(y, { scaleanchor: "x", constrain: "domain" }), Object.assign(x, { constrain: "domain" });
    }
    else {
      const values = (key) => marks.filter((mark) => mark.kind === "line" && shown(mark)).flatMap((mark) => mark[key]).filter(drawable);
      Object.assign(x, logLabels(x, plot.x, values("x")), x.type === "log" && !plot.x.steps ? constant(x, extent(marks, "x")) : {}, wholeSteps(plot, marks));
      Object.assign(y, logLabels(y, plot.y, values("y")), constant(y, extent(marks, "y")));
      if (!values("y").length) Object.assign(x, { visible: false }), Object.assign(y, { visible: false }); // no axes from -1 to 4
    }
    const beside = legend > 8;
    return {
      height: plot.height + (legend > 1 && !beside ? 22 * Math.ceil(legend / 3) : 0), margin: { l: 56, r: 12, t: 12, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), family: "inherit", size: 12 },
      hoverlabel: { bgcolor: css("--soft"), bordercolor: css("--line"), font: { color: css("--ink") } },
      xaxis: x, yaxis: y, shapes: heat && plot.square ? borders(heat) : [], showlegend: legend > 1, hovermode: "closest",
      legend: beside ? { font: { size: 10 } } : { orientation: "h", y: -0.2, yanchor: "top", x: 0, font: { size: 11 } },
    };
  }

  // Thin lines between the classes; none where each row is its own class.
  function borders(heat) {
    const found = groups(heat.rows).slice(1), end = heat.rows.length - 0.5, line = { color: "rgba(255,255,255,.55)", width: 1 };
    if (found.length > 60 || found.length + 1 === heat.rows.length) return [];
    return found.flatMap(({ start: s }) => [
      { type: "line", x0: s - 0.5, x1: s - 0.5, y0: -0.5, y1: end, line }, { type: "line", y0: s - 0.5, y1: s - 0.5, x0: -0.5, x1: end, line }]);
  }

  // The page -------------------------------------------------------------------------------------------------------
  const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage"] };
  const section = (panel) => document.querySelector(`[data-panel="${CSS.escape(panel.key)}"]`);
  const position = (panel) => (panel.control ? Math.min(state.at[panel.key] ?? panel.control.start, panel.control.options.length - 1) : 0);
  const frame = (panel, plot) => {
    const place = plot.at ? plot.at[position(panel)] : 0;
    return place === null ? null : plot.frames[place];
  };

  const fold = (panel) => section(panel).querySelector(".fold");

  function draw(panel) {
    if (!fold(panel).open) return; // Plotly measures the place that it has, and there is none
    const boxes = section(panel).querySelectorAll(".plot");
    // All are hidden or shown before the first is drawn: Plotly measures the place that it has.
    panel.plots.forEach((plot, place) => {
      boxes[place].closest("figure").hidden = (plot.run !== null && state.hidden.has(plot.run)) || (!frame(panel, plot) && !plot.empty);
    });
    panel.plots.forEach((plot, place) => {
      const box = boxes[place], marks = frame(panel, plot);
      if (box.closest("figure").hidden) return;
      box.querySelector(":scope > .none, :scope > .lacks")?.remove();
      const settings = layout(plot, marks || []), least = leastStep(marks || []);
      box.classList.toggle("long-legend", !settings.legend.orientation);
      box.style.height = `${settings.height}px`; // holds its place while Plotly measures and redraws
      Plotly.react(box, (marks || []).map((mark) => (mark.kind === "heat" ? heatTrace(mark) : lineTrace(mark, plot, least))), settings, config);
      const told = remark(plot, marks);
      if (told) box.append(element("p", told, marks && marks.filter(shown).flatMap(finite).some(drawable) ? "lacks" : "none"));
    });
    section(panel).querySelectorAll("details[open] .table").forEach((box) => fillTable(box, panel));
    if (panel.key === "all-runs") runs.draw();
  }

  function element(tag, content, name) {
    const made = document.createElement(tag);
    if (content !== undefined) made.textContent = content;
    if (name) made.className = name;
    return made;
  }

  let waiting = 0;
  function drawAll() {
    const turn = ++waiting, queue = [...data.panels];
    delete root.dataset.ready;
    const next = () => {
      if (turn !== waiting) return;
      const panel = queue.shift();
      if (panel) { draw(panel); setTimeout(next, 0); } else { root.dataset.ready = "yes"; }
    };
    next();
  }

  function applyTheme() {
    root.dataset.theme = theme();
    const dark = root.dataset.theme === "dark";
    byId("theme").textContent = dark ? "Light" : "Dark";
    byId("theme").setAttribute("aria-pressed", String(dark));
  }

  // Text alternatives and files ------------------------------------------------------------------------------------
  const said = (value) => (value === null || value === undefined ? "" : typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value));

  function table(head, rows, title) {
    const made = element("table"), top = made.createTHead().insertRow(), body = made.createTBody();
    made.prepend(element("caption", title));
    head.forEach((name) => { const cell = element("th", name); cell.scope = "col"; top.append(cell); });
    rows.forEach((row) => {
      const line = body.insertRow(), first = element("th", said(row[0]));
      first.scope = "row";
      line.append(first, ...row.slice(1).map((value) => element("td", said(value))));
    });
    return made;
  }

  const some = (list, most) => (list.length <= most ? list : Array.from({ length: most }, (_, i) => list[Math.round((i * (list.length - 1)) / (most - 1))]));

  function fillTable(box, panel) {
    box.replaceChildren();
    for (const plot of panel.plots) {
      const marks = (frame(panel, plot) || []).filter((mark) => shown(mark) && (mark.kind === "heat" || mark.legend || mark.run !== null));
      if (!marks.length || (plot.run !== null && state.hidden.has(plot.run))) continue;
      const where = panel.control && plot.at ? ` (${panel.control.options[position(panel)]})` : "";
      if (marks[0].kind === "heat") {
        const z = matrix(marks[0]), rows = some([...marks[0].rows.keys()], 24), columns = some([...marks[0].columns.keys()], 14);
        const part = rows.length < z.length || columns.length < z[0].length ? "; some rows and columns, the CSV has all" : "";
        box.append(table([`${plot.y.title} \\ ${plot.x.title}`, ...columns.map((c) => said(marks[0].columns[c]))],
          rows.map((r) => [marks[0].rows[r], ...columns.map((c) => z[r][c])]), `${plot.caption}${where}${part}`));
      } else {
        const all = [...new Set(marks.flatMap((mark) => mark.x))].sort((a, b) => a - b), xs = some(all, 60);
        const values = marks.map((mark) => new Map(mark.x.map((x, i) => [x, mark.y[i]])));
        box.append(table([plot.x.title, ...marks.map((mark) => mark.name)], xs.map((x) => [x, ...values.map((v) => v.get(x))]),
          `${plot.caption}, ${plot.y.title}${where}${xs.length < all.length ? "; some rows, the CSV has all" : ""}`));
      }
    }
  }

  // A text cell that begins like a formula would be run by spreadsheets; an apostrophe keeps it text.
  const cell = (value) => {
    if (typeof value === "number") return String(value);
    if (value === null || value === undefined) return "";
    const plain = /^[=+@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",\n\r]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
  };

  function csv(panel) {
    const rows = [["figure", "run", "at", "series", "x", "y", "value"]];
    for (const plot of panel.plots) plot.frames.forEach((marks, place) => {
      const first = plot.at ? plot.at.indexOf(place) : -1, at = first >= 0 ? panel.control.options[first] : "";
      for (const mark of marks) {
        const run = mark.run === null ? "" : data.runs[mark.run].name;
        if (mark.kind === "heat") matrix(mark).forEach((row, r) => row.forEach((value, c) => rows.push([plot.caption, run, at, mark.name, mark.columns[c], mark.rows[r], value])));
        else mark.x.forEach((x, i) => rows.push([plot.caption, run, at, mark.name, x, mark.y[i], ""]));
      }
    });
    return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
  }

  function plain(panel) {
    return { ...panel, plots: panel.plots.map((plot) => ({ ...plot, frames: plot.frames.map((marks) => marks.map((mark) => {
      if (mark.kind !== "heat") return mark;
      const { decoded, ...rest } = mark;
      return { ...rest, z: matrix(mark) };
    })) })) };
  }

  function save(name, type, content) {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  async function saveFigures(panel) {
    const boxes = [...section(panel).querySelectorAll(".plot")].filter((box) => !box.closest("figure").hidden);
    for (const [place, box] of boxes.entries()) {
      const image = await Plotly.toImage(box, { format: "svg", width: 720, height: box.layout.height });
      save(`${panel.key}-${place + 1}.svg`, "image/svg+xml", decodeURIComponent(image.slice(image.indexOf(",") + 1)));
    }
  }

  const savers = {
    csv: (panel) => save(`${panel.key}.csv`, "text/csv", csv(panel)),
    json: (panel) => save(`${panel.key}.json`, "application/json", JSON.stringify(plain(panel))),
    svg: saveFigures,
  };

  // Panels that are folded -----------------------------------------------------------------------------------------
  data.panels.forEach((panel) => { state.open[panel.key] = fold(panel).open; });
  const openAsLeft = (panel) => state.open[panel.key] ?? fold(panel).open;

  function unfold(hash) {
    const found = hash && byId(hash.slice(1))?.querySelector(".fold");
    if (found) found.open = true;
  }

  // What people do -------------------------------------------------------------------------------------------------
  const panelOf = (node) => data.panels.find((panel) => panel.key === node.closest("[data-panel]")?.dataset.panel);

  document.addEventListener("click", (event) => {
    const link = event.target.closest("nav a");
    if (link) unfold(link.hash);
    const button = event.target.closest("[data-save]");
    if (button) savers[button.dataset.save](panelOf(button));
  });
  document.addEventListener("toggle", (event) => {
    const panel = panelOf(event.target);
    if (panel && event.target === fold(panel)) {
      if (state.printing || state.open[panel.key] === event.target.open) return; // nobody clicked
      state.open[panel.key] = event.target.open;
      draw(panel);
    } else if (panel && event.target.open) fillTable(event.target.querySelector(".table"), panel);
  }, true);
  document.addEventListener("input", (event) => {
    const control = event.target;
    if (!control.matches(".control input, .control select")) return;
    const panel = panelOf(control);
    if (!panel) return; // the table's filter is no panel's
    state.at[panel.key] = Number(control.value);
    tell(panel);
    draw(panel);
  });
  byId("runs").addEventListener("change", (event) => {
    const run = Number(event.target.dataset.run);
    if (event.target.checked) state.hidden.delete(run); else state.hidden.add(run);
    runs.cards();
    drawAll();
  });
  byId("log-steps").addEventListener("change", (event) => { state.logSteps = event.target.checked; drawAll(); });
  byId("save-all").addEventListener("click", () => save("gramscope-report.json", "application/json", JSON.stringify({ ...data, panels: data.panels.map(plain) })));
  byId("unfold").addEventListener("click", () => document.querySelectorAll(".fold").forEach((each) => { each.open = true; }));
  byId("theme").addEventListener("click", () => {
    state.theme = theme() === "dark" ? "light" : "dark";
    try { localStorage.setItem("gramscope-theme", state.theme); } catch { /* a private window forgets it */ }
    applyTheme();
    drawAll();
  });
  wish.addEventListener("change", () => { applyTheme(); drawAll(); });
  const forPrint = (printing) => () => {
    state.printing = printing;
    applyTheme();
    data.panels.forEach((panel) => { fold(panel).open = printing || openAsLeft(panel); draw(panel); });
  };
  addEventListener("beforeprint", forPrint(true));
  addEventListener("afterprint", forPrint(false));

  function tell(panel) {
    const control = section(panel).querySelector(".control input, .control select");
    if (!control) return;
    const option = panel.control.options[position(panel)];
    if (control.type === "range") {
      control.max = panel.control.options.length - 1;
      const step = Number(option).toLocaleString("en"); // as the words and the axes write it
      control.setAttribute("aria-valuetext", `step ${step}`);
      section(panel).querySelector("output").textContent = step;
    }
    control.value = position(panel);
  }

  const runs = gramscopeRuns({ data: () => data, hidden: state.hidden, element, colour, symbol, css, text, said, cell, save, position, frame, config, written, logLabels,
    logSteps: () => state.logSteps, redraw: () => { tellRuns(); runs.draw(); drawAll(); } });

  function tellRuns() {
    document.querySelectorAll("#runs [data-run]").forEach((box) => { box.checked = !state.hidden.has(Number(box.dataset.run)); });
  }

  // Following a run that grows ---------------------------------------------------------------------------------------
  const shape = (payload) => JSON.stringify(payload.panels.map((panel) => [panel.key, panel.plots.map((plot) => plot.caption), panel.control?.kind]));

  function take(payload) {
    if (JSON.stringify(payload.runs) !== JSON.stringify(data.runs)) { location.reload(); return; } // a run has begun
    const same = shape(payload) === shape(data), old = Object.fromEntries(data.panels.map((panel) => [panel.key, panel]));
    const fresh = new DOMParser().parseFromString(payload.html, "text/html");
    data = payload;
    if (same) document.querySelectorAll("[data-part]").forEach((node) => {
      const replacement = fresh.querySelector(`[data-part="${CSS.escape(node.dataset.part)}"]`);
      if (replacement) node.replaceChildren(...replacement.childNodes);
    });
    else { byId("live").replaceChildren(...fresh.body.childNodes); runs.begin(); }
    for (const panel of data.panels) {
      const before = old[panel.key]?.control;
      // A slider left at the end stays at the end; one that was moved stays at its step.
      if (before && panel.control && state.at[panel.key] !== undefined) {
        const wanted = before.options[Math.min(state.at[panel.key], before.options.length - 1)], atEnd = state.at[panel.key] >= before.options.length - 1;
        const place = panel.control.options.indexOf(wanted);
        if (place < 0 || (atEnd && panel.control.kind === "slider")) delete state.at[panel.key]; else state.at[panel.key] = place;
      }
      fold(panel).open = openAsLeft(panel);
      tell(panel);
    }
    runs.draw();
    drawAll();
  }

  let version = data.version, failed = 0;
  async function follow() {
    try {
      const reply = document.hidden ? { status: 304 } : await fetch("data.json", { headers: { "If-None-Match": `"${version}"` }, cache: "no-store" });
      if (reply.status === 200) {
        const payload = await reply.json();
        if (payload.error) throw new Error(payload.error);
        version = payload.version;
        take(payload);
        byId("status").textContent = payload.status;
      } else if (reply.status !== 304) throw new Error(`the server answered ${reply.status}`);
      else if (failed) byId("status").textContent = data.status;
      failed = 0;
    } catch (error) {
      failed += 1;
      if (failed === 2) byId("status").textContent = `No answer (${error.message}); the page shows what it last saw and keeps asking.`;
    }
    setTimeout(follow, Number(root.dataset.live) * Math.min(1 + failed, 10));
  }

  byId("log-steps").checked = state.logSteps;
  applyTheme();
  unfold(location.hash);
  data.panels.forEach(tell);
  runs.begin();
  runs.draw();
  drawAll();
  if (root.dataset.live) { byId("status").textContent = data.status; setTimeout(follow, Number(root.dataset.live)); }
})();
