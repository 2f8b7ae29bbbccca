// The page: one connection, one list, and the view that the hash of the URL selects.

import { Address, Client } from "./client.js";
import { Delays } from "./delays.js";
import { copy } from "./dom.js";
import { Registry } from "./registry.js";
import { Recent, session, theme } from "./store.js";
import { openRequestLog } from "./views/answer.js";
import { BucketView, BucketsView } from "./views/buckets.js";
import { ClusterView, clusterOf } from "./views/cluster.js";
import { openConnection, openHelp } from "./views/connection.js";
import { openCreate, openFork } from "./views/dialogs.js";
import { FolderView } from "./views/folder.js";
import { HomeView } from "./views/home.js";
import { PipelineView } from "./views/pipeline.js";
import { Sidebar } from "./views/sidebar.js";
import { StreamView } from "./views/stream.js";
import { SubscriptionView, SubscriptionsView } from "./views/subscriptions.js";

const decode = (piece) => {
  try {
    return decodeURIComponent(piece);
  } catch {
    return piece;
  }
};

/** The token of a link that `headwater up` printed. It is kept until the tab is closed and removed from the address. */
function tokenOfUrl() {
  const [path, search = ""] = location.hash.split("?");
  const token = new URLSearchParams(search).get("token");
  if (!token) return null;
  history.replaceState(null, "", path);
  session.set(null, token, true);
  return token;
}

class App {
  constructor() {
    // The server of this page, also below a path prefix: …/ui/ is next to …/v1/.
    this.home = new URL("..", document.baseURI).href.replace(/\/+$/, "");
    this.main = document.getElementById("main");
    this.side = document.getElementById("side");
    this.view = null;
    this.#applyTheme(theme.get());
    addEventListener("hashchange", () => this.#route());
    addEventListener("keydown", (event) => this.#key(event));
    this.connect(session.base() || this.home, tokenOfUrl() || session.token());
  }

  /** Connect to this server. */
  connect(base, token) {
    this.view?.stop();
    this.view = null;
    this.registry?.stop();
    this.sidebar?.stop();
    this.client = new Client(base);
    this.client.token = token;
    this.delays = new Delays();
    this.buckets = new Recent("buckets", this.client.base);
    this.subscriptions = new Recent("subscriptions", this.client.base);
    this.registry = new Registry(this.client, (registry) => {
      this.sidebar.connection(registry, this.client.base);
      this.sidebar.update();
      this.view?.listed?.();
    });
    this.sidebar = new Sidebar(this, this.side);
    this.sidebar.connection(this.registry, this.client.base);
    this.registry.start();
    this.#showCluster(this.client);
    this.#route();
  }

  /** Other servers may not know the address; then there is no link. */
  async #showCluster(client) {
    const found = await clusterOf(client).catch(() => null);
    if (client === this.client) this.sidebar.showCluster(Boolean(found));
  }

  go(hash) {
    if (location.hash === hash) this.#route();
    else location.hash = hash;
  }

  copyCurl(request) {
    return copy(this.client.curl(request), "curl command copied");
  }

  openConnection() {
    openConnection(this);
  }

  openToken() {
    openConnection(this, true);
  }

  openCreate(options) {
    openCreate(this, options);
  }

  openFork(address, offset) {
    openFork(this, address, offset);
  }

  openRequests() {
    openRequestLog(this);
  }

  openHelp() {
    openHelp();
  }

  toggleTheme() {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    const next = dark ? "light" : "dark";
    theme.set(next);
    this.#applyTheme(next);
  }

  #applyTheme(name) {
    if (name === "light" || name === "dark") document.documentElement.dataset.theme = name;
  }

  #route() {
    const hash = location.hash || "#/";
    const [path, search = ""] = hash.slice(1).split("?");
    const [, place, ...rest] = path.split("/");
    this.view?.stop();
    this.view = this.#view(place, rest.map(decode), new URLSearchParams(search));
    this.main.replaceChildren(this.view.element);
    document.body.dataset.place = place || "home";
    this.sidebar.route(hash);
    const name = place === "stream" || place === "bucket" || place === "follow" ? decode(rest.join("/")) : "";
    document.title = name ? `${name} · Headwater` : "Headwater streams";
  }

  #view(place, rest, query) {
    if (place === "stream" && rest[0]) return new StreamView(this, new Address(rest.join("/")), query);
    if (place === "bucket" && rest.length >= 2) return new StreamView(this, new Address(rest.slice(1).join("/"), rest[0]), query);
    if (place === "bucket" && rest[0]) return new BucketView(this, rest[0]);
    if (place === "follow") return new FolderView(this, rest.join("/"));
    if (place === "buckets") return new BucketsView(this);
    if (place === "subscriptions") return new SubscriptionsView(this);
    if (place === "subscription" && rest[0]) return new SubscriptionView(this, rest.join("/"));
    if (place === "cluster") return new ClusterView(this);
    if (place === "pipeline") return new PipelineView(this);
    return new HomeView(this);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = event.target.closest?.("input, textarea, select");
    if (typing) {
      if (event.key === "Escape") typing.blur();
      return;
    }
    const moves = {
      "/": () => this.sidebar.filter.focus(),
      n: () => this.openCreate(),
      r: () => this.openRequests(),
      t: () => this.toggleTheme(),
      g: () => this.sidebar.list.element.focus(),
      "?": () => this.openHelp(),
    };
    if (this.view?.key?.(event.key)) event.preventDefault();
    else if (event.key in moves) {
      event.preventDefault();
      moves[event.key]();
    }
  }
}

window.headwater = new App();
