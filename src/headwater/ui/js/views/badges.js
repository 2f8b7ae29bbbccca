// The badges of a stream: type, open or closed, lifetime, size, last write.

import { badge } from "../dom.js";
import { ago, bytes, plural, shortType } from "../format.js";
import { sizeOf } from "../metadata.js";

export function lifetime(info) {
  if (info?.ttl) return { text: `TTL ${seconds(Number(info.ttl))}`, title: `Stream-TTL: ${info.ttl}. Restarted by each read or write.` };
  if (info?.expiresAt) return { text: `until ${info.expiresAt.slice(0, 16).replace("T", " ")}`, title: `Stream-Expires-At: ${info.expiresAt}` };
  return null;
}

function seconds(value) {
  if (value % 86400 === 0) return `${value / 86400} d`;
  if (value % 3600 === 0) return `${value / 3600} h`;
  return value % 60 === 0 && value > 60 ? `${value / 60} min` : `${value} s`;
}

export function streamBadges(type, info, { long = false } = {}) {
  if (info?.missing) return [badge("deleted", "bad")];
  const shown = [badge(shortType(info?.type || type), "type", info?.type || type)];
  if (info?.closed) shown.push(badge("closed", "closed"));
  else if (long && info) shown.push(badge("open", "good"));
  const life = lifetime(info);
  if (life) shown.push(badge(life.text, "life", life.title));
  if (info) {
    const size = sizeOf(info);
    if (info.messages !== null && info.messages !== undefined) shown.push(badge(plural(info.messages, "message"), "plain"));
    if (size !== null) shown.push(badge(bytes(size), "plain"));
    if (info.snapshot) shown.push(badge("snapshot", "life", `Stream-Snapshot-Offset: ${info.snapshot}`));
    if (info.writtenAt) shown.push(badge(ago(info.writtenAt), "plain", `Last write: ${new Date(info.writtenAt).toISOString()}`));
  }
  return shown;
}
