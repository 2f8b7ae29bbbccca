// Find the offset of a message by its number, with the `splits` extension (docs/extensions.md).

import { parseOffset } from "./messages.js";

const FAN_OUT = 64;
const SMALL_BYTES = 64 * 1024;

/** The first offset of a stream that can be read, and the number of messages before it. */
export function firstStored(info) {
  const offset = info.earliest ?? info.snapshot ?? "-1";
  return { offset, index: parseOffset(offset)?.index ?? 0 };
}

/** A message boundary at or shortly before the message with this number, between two offsets. */
export async function offsetBefore(client, address, { start, end, index, signal }) {
  let from = start;
  let until = end;
  for (;;) {
    const { ranges } = await client.json({ path: address.path, query: { offset: from, until, splits: FAN_OUT }, signal, quiet: true });
    const holding = ranges.find((range) => range.end_position > index);
    if (!holding) return from;
    if (holding.bytes <= SMALL_BYTES || holding.end_position - holding.start_position <= 1) return holding.start;
    from = holding.start;
    until = holding.end;
  }
}
