/** Reads JSON Schemas of an OpenAPI description: the fields of an object, and the type of a value in words. */

/** Deeper than any request of ours; a schema may refer to itself. */
const MAX_DEPTH = 8;

export class Schemas {
  constructor(description) {
    this.named = description.components?.schemas ?? {};
  }

  /** What a reference stands for. */
  resolve(schema) {
    let found = schema ?? {};
    for (let step = 0; found.$ref && step < MAX_DEPTH; step += 1) {
      const { $ref, ...beside } = found;
      found = { ...this.named[$ref.split("/").at(-1)], ...beside };
    }
    return found;
  }

  /** Without the `null` that stands for an absent value. */
  present(schema) {
    const found = this.resolve(schema);
    const kinds = (found.anyOf ?? found.oneOf ?? []).filter((one) => one.type !== "null");
    if (kinds.length === 1) {
      const { anyOf, oneOf, ...beside } = found;
      return { ...this.present(kinds[0]), ...beside };
    }
    return found;
  }

  /** The fields of an object: `[{ name, schema, required }]`, those that must be there first. */
  fields(schema, depth = 0) {
    const found = this.present(schema);
    if (depth > MAX_DEPTH) {
      return [];
    }
    const inner = found.type === "array" || found.items ? this.fields(found.items, depth + 1) : [];
    const own = Object.entries(found.properties ?? {}).map(([name, field]) => {
      return { name, schema: field, required: (found.required ?? []).includes(name) };
    });
    const parts = (found.allOf ?? []).flatMap((part) => this.fields(part, depth + 1));
    return [...own, ...parts, ...inner].sort((a, b) => Number(b.required) - Number(a.required));
  }

  /** `list of text`, `number, 0 to 2`. */
  type(schema, depth = 0) {
    const found = this.present(schema);
    if (depth > 3) {
      return "value";
    }
    const kinds = found.anyOf ?? found.oneOf;
    if (kinds) {
      const words = kinds.filter((one) => one.type !== "null").map((one) => this.type(one, depth + 1));
      return [...new Set(words)].join(" or ") || "value";
    }
    if (found.const !== undefined) return JSON.stringify(found.const);
    if (found.enum) return found.enum.filter((one) => one !== null).map((one) => JSON.stringify(one)).join(" or ");
    const [type] = [found.type].flat().filter((one) => one !== "null");
    if (type === "array") {
      return `list of ${this.type(found.items ?? {}, depth + 1)}`;
    }
    const names = { string: "text", integer: "whole number", number: "number", boolean: "true or false", object: "object" };
    return `${names[type] ?? "any value"}${range(found)}`;
  }

  description(schema) {
    return (schema?.description ?? this.present(schema).description ?? "").replace(/\s*\n\s*/g, " ");
  }
}

function range({ minimum, maximum, format }) {
  // The limits of a machine's numbers are no news.
  const least = minimum === 0 && /^u?int/.test(format ?? "") && maximum === undefined ? undefined : minimum;
  const most = maximum > 2 ** 31 - 2 ? undefined : maximum;
  if (least !== undefined && most !== undefined) return `, ${least} to ${most}`;
  if (least !== undefined) return `, ${least} or more`;
  return most === undefined ? "" : `, at most ${most}`;
}
