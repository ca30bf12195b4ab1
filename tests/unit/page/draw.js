// Runs page.js on the data of a page in a small stand-in for a browser, and writes the elements that it makes as HTML.
//
//     node draw.js page.js data.json
"use strict";
const { readFileSync } = require("fs");
const { runInNewContext } = require("vm");

const escaped = (text) => text.replace(/[&<>"]/g, (char) => `&#${char.charCodeAt(0)};`);

class Element {
  constructor(tag, textContent = "") {
    Object.assign(this, { tag, textContent, attributes: {}, children: [], style: {}, dataset: {}, clientWidth: 500 });
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
  }
  getAttribute(name) {
    return this.attributes[name];
  }
  append(...children) {
    this.children.push(...children.map((child) => (child instanceof Element ? child : String(child))));
  }
  prepend(...children) {
    this.children.unshift(...children);
  }
  addEventListener() {}
  html() {
    const shown = Object.entries(this.attributes).map(([name, value]) => ` ${name}="${escaped(value)}"`);
    const inner = this.children.map((child) => (child instanceof Element ? child.html() : escaped(child)));
    return `<${this.tag}${shown.join("")}>${inner.join("")}</${this.tag}>`;
  }
}

const [script, data] = process.argv.slice(2);
const places = Object.fromEntries(["header", "nav ul", "main", "footer", ".verdict"].map((name) => [name, new Element("div")]));
const plots = [];
class uPlot {
  constructor(options, points) {
    plots.push({ points, hasLog: options.scales.y.distr === 3 });
  }
}
const document = {
  getElementById: () => new Element("script", readFileSync(data, "utf8")),
  querySelector: (name) => places[name],
  createElement: (tag) => new Element(tag),
};
runInNewContext(readFileSync(script, "utf8"), {
  document, uPlot, addEventListener() {}, matchMedia: () => new Element("query"), devicePixelRatio: 1,
});
console.log(JSON.stringify({ html: Object.values(places).map((place) => place.html()).join("\n"), plots: plots.length }));
