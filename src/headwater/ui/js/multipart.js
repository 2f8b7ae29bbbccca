// Parse the multipart/mixed response (RFC 2046) of `/bootstrap`.

const encoder = new TextEncoder();
const decoder = new TextDecoder();

export function boundaryOf(contentType) {
  const found = /boundary=(?:"([^"]+)"|([^;\s]+))/i.exec(contentType || "");
  return found ? (found[1] ?? found[2]) : null;
}

/** Each part: its content type and its bytes. */
export function parts(data, boundary) {
  const mark = encoder.encode(`--${boundary}`);
  const found = [];
  let at = indexOf(data, mark, 0);
  while (at >= 0) {
    const start = at + mark.length;
    if (data[start] === 45 && data[start + 1] === 45) break;
    // The boundary's own line ends here; blanks may pad it.
    const lineEnd = indexOf(data, [13, 10], start);
    const next = indexOf(data, encoder.encode(`\r\n--${boundary}`), lineEnd);
    if (lineEnd < 0 || next < 0) break;
    found.push(part(data.subarray(lineEnd + 2, next)));
    at = next + 2;
  }
  return found;
}

function part(data) {
  // Without header lines the blank line comes at once.
  const bare = data[0] === 13 && data[1] === 10;
  const end = bare ? -2 : indexOf(data, [13, 10, 13, 10], 0);
  const head = bare || end < 0 ? "" : decoder.decode(data.subarray(0, end));
  const type = /^content-type:\s*(.*)$/im.exec(head)?.[1]?.trim() ?? "";
  return { type, data: data.subarray(end < 0 && !bare ? data.length : end + 4) };
}

function indexOf(data, wanted, from) {
  outer: for (let at = Math.max(0, from); at <= data.length - wanted.length; at += 1) {
    if (data[at] !== wanted[0]) continue;
    for (let index = 1; index < wanted.length; index += 1) if (data[at + index] !== wanted[index]) continue outer;
    return at;
  }
  return -1;
}
