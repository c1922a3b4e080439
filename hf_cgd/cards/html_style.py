"""The style of the report page: narrow and wide, light and dark, on screen and on paper."""

STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #595959; --paper: #ffffff; --card: #f6f6f4; --line: #d8d8d4;
  --bar: #0072b2; --worst: #b34700; --muted: #b0b0b0; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --soft: #b0b0b0; --paper: #16181b; --card: #202327;
  --line: #3a3f45; --bar: #56b4e9; --worst: #ff9a57; --muted: #6a6f75; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 1.5rem 0 0.5rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.25rem 0 0.4rem; overflow-wrap: anywhere; }
p { margin: 0.4rem 0; overflow-wrap: anywhere; }
.runs { display: grid; gap: 1rem; margin-top: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); }
.run { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 0.25rem 1rem 1rem;
  min-width: 0; }
.numbers { display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem; margin: 0.75rem 0; padding: 0; list-style: none; }
.numbers b { display: block; font-size: 1.4rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--soft); font-size: 0.85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { text-align: right; padding: 0.25rem 0.5rem; border-bottom: 1px solid var(--line); vertical-align: middle; }
th, td { white-space: nowrap; }
th:first-child, td:first-child, .settings td { white-space: normal; overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; min-width: 7rem; }
th { color: var(--soft); font-weight: 600; }
tr.worst td { font-weight: 700; }
tr.worst td:first-child::after { content: " (worst)"; color: var(--worst); }
.bar { position: relative; display: block; min-width: 90px; height: 1rem; background: var(--line);
  border-radius: 2px; }
.bar i { position: absolute; inset: 0 auto 0 0; background: var(--bar); border-radius: 2px; }
tr.worst .bar i { background: var(--worst); }
.bar u { position: absolute; top: 0.4rem; height: 0.2rem; background: var(--ink); }
svg { max-width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font: 13px system-ui, sans-serif; }
svg .grid { stroke: var(--line); }
.legend { list-style: none; margin: 0.25rem 0; padding: 0; display: flex; flex-wrap: wrap; gap: 0.1rem 1rem;
  font-size: 0.85rem; }
.legend svg { display: inline-block; vertical-align: middle; }
.matrix td, .matrix th { text-align: center; min-width: 3rem; white-space: normal; overflow-wrap: anywhere; }
.matrix td { color: #1a1a1a; }
.matrix th:first-child { text-align: left; }
details { margin-top: 0.75rem; }
summary { cursor: pointer; font-weight: 600; }
.settings td { text-align: left; }
footer { color: var(--soft); font-size: 0.85rem; margin: 2rem 0 1rem; }
@media (prefers-color-scheme: dark) { svg polyline, svg circle, .legend line { filter: brightness(1.7); } }
@media print { .run { break-inside: avoid; } details > * { display: block; } }
"""
