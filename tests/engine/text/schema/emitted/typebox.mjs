// The JSON schema of each of TypeBox's types: npm i typebox; node typebox.mjs > typebox.json
import Type from "typebox";
const T = Type;
const types = {
  "Any": T.Any(), "Unknown": T.Unknown(), "Never, optional": T.Object({ a: T.Optional(T.Never()), b: T.String() }), "Null": T.Null(), "Boolean": T.Boolean(),
  "String": T.String(), "String, lengths": T.String({ minLength: 1, maxLength: 9 }), "String, pattern": T.String({ pattern: "^[a-c]+$" }), "String, format": T.String({ format: "email" }),
  "Number": T.Number(), "Number, bounds": T.Number({ exclusiveMinimum: 0, maximum: 0.5 }), "Number, multipleOf": T.Number({ multipleOf: 0.5 }), "Integer": T.Integer({ minimum: 0, exclusiveMaximum: 9 }),
  "Literal": T.Literal("a"), "Enum": T.Enum(["a", "b"]), "Union": T.Union([T.String(), T.Integer()]), "Union of literals": T.Union([T.Literal("a"), T.Literal(2)]),
  "Object": T.Object({ a: T.String(), b: T.Optional(T.Integer()) }), "Object, closed": T.Object({ a: T.String() }, { additionalProperties: false }),
  "Object, minProperties": T.Object({ a: T.Optional(T.String()), b: T.Optional(T.String()), c: T.Optional(T.String()) }, { minProperties: 2 }), "Object, others of a type": T.Object({ a: T.String() }, { additionalProperties: T.Integer() }),
  "Array": T.Array(T.String(), { minItems: 1, maxItems: 3 }), "Array, uniqueItems": T.Array(T.String(), { uniqueItems: true }), "Array, uniqueItems of literals": T.Array(T.Enum(["a", "b", "c"]), { uniqueItems: true }), "Array, contains": T.Array(T.Integer(), { contains: T.Literal(1), minContains: 1 }),
  "Tuple": T.Tuple([T.String(), T.Integer()]), "Record": T.Record(T.String(), T.Integer()), "Record, by pattern": T.Record(T.String({ pattern: "^[a-z]{2}$" }), T.Integer()), "Record, by literals": T.Record(T.Union([T.Literal("a"), T.Literal("b")]), T.Integer()), "Record, by integers": T.Record(T.Integer(), T.String()),
  "Intersect": T.Intersect([T.Object({ a: T.String() }), T.Object({ b: T.Integer() })]), "Intersect, unevaluatedProperties": T.Intersect([T.Object({ a: T.String() }), T.Object({ b: T.Integer() })], { unevaluatedProperties: false }),
  "Evaluate of Intersect": T.Evaluate?.(T.Intersect([T.Object({ a: T.String() }), T.Object({ b: T.Integer() })])), "TemplateLiteral": T.TemplateLiteral("v${0|1}.${string}"), "Cyclic": T.Cyclic?.({ Node: T.Object({ value: T.Integer(), nodes: T.Array(T.Ref("Node")) }) }, "Node"),
  "Partial": T.Partial(T.Object({ a: T.String(), b: T.Integer() })), "Pick": T.Pick(T.Object({ a: T.String(), b: T.Integer() }), ["a"]), "KeyOf": T.KeyOf(T.Object({ a: T.String(), b: T.Integer() })), "If, Then, Else": { type: "integer", if: { minimum: 5 }, then: { multipleOf: 5 } },
};
const emitted = {};
for (const [name, type] of Object.entries(types)) if (type) emitted[name] = type; else console.error("not there:", name);
console.log(JSON.stringify(emitted, null, 1));
