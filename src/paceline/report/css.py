"""The style of the report page: light or dark as the browser is."""

from __future__ import annotations

REPORT_CSS = """
:root { color-scheme: light dark; --ink: #1f2430; --paper: #ffffff; --soft: #f3f5f8; --line: #dfe3ea; --note: #5d6678; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ee; --paper: #15181e; --soft: #1e232b; --line: #343b47; --note: #9aa3b2; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 940px; padding: 24px 20px 60px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 8px; }
p { margin: 6px 0; } .note, figcaption { color: var(--note); font-size: 13.5px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 18px 0; }
.tile { background: var(--soft); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.tile b { display: block; font-size: 17px; font-weight: 600; white-space: nowrap; }
.tile span { color: var(--note); font-size: 13px; }
.tile b span { color: inherit; font-size: inherit; }
.answer { font-size: 17px; font-weight: 600; }
figure { margin: 12px 0 20px; }
figure svg { display: block; width: 100%; height: auto; } .narrow { display: none; }
.tabs > input { position: absolute; opacity: 0; }
.tabs > label { display: inline-block; padding: 6px 14px; margin: 14px 4px 0 0; border-bottom: 3px solid var(--line);
  cursor: pointer; color: var(--note); }
.tabs > input:checked + label { color: var(--ink); border-color: #3b7dc4; font-weight: 600; }
.tabs > input:focus-visible + label { outline: 2px solid #3b7dc4; }
.tab { display: none; } #tab-speed:checked ~ #body-speed, #tab-learning:checked ~ #body-learning,
#tab-settings:checked ~ #body-settings { display: block; }
#evaluations td, #evaluations th { overflow-wrap: normal; white-space: nowrap; }
.sample summary { overflow-wrap: anywhere; } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 6px 0;
  padding: 8px 12px; font: 13px/1.45 ui-monospace, monospace; border-left: 3px solid var(--line); }
pre.written { background: var(--soft); border-color: #3b7dc4; }
@media (max-width: 600px) { body { padding: 16px 20px 40px; } .wide { display: none; } .narrow { display: block; }
  td, th { padding-right: 10px; } }
@media print { .tab { display: block; } .tabs > label { display: none; } }
figcaption { margin-top: 4px; } .nothing { color: var(--note); font-style: italic; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 8px 0; list-style: none; font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 6px; vertical-align: -1px; }
h3 { font-size: 14px; margin: 16px 0 0; } summary { cursor: pointer; margin-top: 12px; }
table { border-collapse: collapse; font-size: 13.5px; } td, th { text-align: left; padding: 3px 18px 3px 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; vertical-align: top; }
code { font-family: ui-monospace, monospace; font-size: 0.93em; }
"""
