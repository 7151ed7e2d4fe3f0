// The JSON schema of each of Zod's types: npm i zod; node zod.mjs > zod.json
import { z } from "zod";
const tree = z.object({ value: z.number(), get children() { return z.array(tree); } });
const shape = z.discriminatedUnion("kind", [
  z.object({ kind: z.literal("circle"), radius: z.number().positive() }),
  z.object({ kind: z.literal("square"), side: z.number().min(1) }),
]);
const types = {
  "z.string()": z.string(), "z.string().min(1).max(9)": z.string().min(1).max(9), "z.string().regex()": z.string().regex(/^[a-c]+$/),
  "z.string().startsWith()": z.string().startsWith("ab"), "z.string().endsWith()": z.string().endsWith("ab"),
  "z.string().includes()": z.string().includes("ab"), "z.string().lowercase()": z.string().lowercase(), "z.string().uppercase()": z.string().uppercase(),
  "z.email()": z.email(), "z.email({ pattern: z.regexes.html5Email })": z.email({ pattern: z.regexes.html5Email }),
  "z.email({ pattern: z.regexes.rfc5322Email })": z.email({ pattern: z.regexes.rfc5322Email }),
  "z.uuid()": z.uuid(), "z.uuidv4()": z.uuidv4(), "z.uuidv7()": z.uuidv7(), "z.guid()": z.guid(), "z.url()": z.url(), "z.httpUrl()": z.httpUrl(),
  "z.emoji()": z.emoji(), "z.nanoid()": z.nanoid(), "z.cuid()": z.cuid(), "z.cuid2()": z.cuid2(), "z.ulid()": z.ulid(), "z.xid()": z.xid(),
  "z.ksuid()": z.ksuid(), "z.ipv4()": z.ipv4(), "z.ipv6()": z.ipv6(), "z.mac()": z.mac?.(), "z.cidrv4()": z.cidrv4(), "z.cidrv6()": z.cidrv6(),
  "z.base64()": z.base64(), "z.base64url()": z.base64url(), "z.e164()": z.e164(), "z.jwt()": z.jwt(), "z.hostname()": z.hostname?.(), "z.hex()": z.hex?.(),
  "z.iso.date()": z.iso.date(), "z.iso.time()": z.iso.time(), "z.iso.datetime()": z.iso.datetime(),
  "z.iso.datetime({ offset: true })": z.iso.datetime({ offset: true }), "z.iso.duration()": z.iso.duration(),
  "z.number()": z.number(), "z.number().gt(0).lte(1)": z.number().gt(0).lte(1), "z.number().multipleOf(0.25)": z.number().multipleOf(0.25),
  "z.int()": z.int(), "z.int32()": z.int32(), "z.uint32()": z.uint32(), "z.float32()": z.float32(), "z.float64()": z.float64(),
  "z.int().positive().max(9)": z.int().positive().max(9),
  "z.boolean()": z.boolean(), "z.null()": z.null(), "z.any()": z.any(), "z.unknown()": z.unknown(), "z.literal()": z.literal(["a", 1, null]),
  "z.enum()": z.enum(["a", "b"]), "z.nullable()": z.nullable(z.string()), "z.optional()": z.object({ a: z.string().optional() }),
  "z.nullish()": z.object({ a: z.string().nullish() }), "z.default()": z.object({ a: z.string().default("x") }), "z.readonly()": z.array(z.string()).readonly(),
  "z.object()": z.object({ a: z.string(), b: z.object({ c: z.number() }) }), "z.strictObject()": z.strictObject({ a: z.string() }),
  "z.looseObject()": z.looseObject({ a: z.string() }), "z.object().catchall()": z.object({ a: z.string() }).catchall(z.number()),
  "z.array()": z.array(z.string()), "z.array().min().max()": z.array(z.int()).min(1).max(3), "z.array().nonempty()": z.array(z.int()).nonempty(),
  "z.tuple()": z.tuple([z.string(), z.number()]), "z.tuple().rest()": z.tuple([z.string()]).rest(z.number()), "z.tuple() with optional": z.tuple([z.string(), z.number().optional()]),
  "z.record(z.string(), ..)": z.record(z.string(), z.number()), "z.record(z.enum(), ..)": z.record(z.enum(["a", "b"]), z.boolean()),
  "z.partialRecord()": z.partialRecord(z.enum(["a", "b"]), z.boolean()), "z.looseRecord()": z.looseRecord?.(z.string().regex(/^x/), z.number()),
  "z.record(z.string().regex(), ..)": z.record(z.string().regex(/^[a-z]{2}$/), z.number()), "z.record(z.uuid(), ..)": z.record(z.uuid(), z.number()),
  "z.record(z.number(), ..)": z.record(z.number(), z.string()), "z.record(z.string().min(2), ..)": z.record(z.string().min(2), z.string()),
  "z.union()": z.union([z.string(), z.number()]), "z.xor()": z.xor?.([z.string(), z.number()]), "z.discriminatedUnion()": shape,
  "z.intersection()": z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })), "z.object().extend()": z.object({ a: z.string() }).extend({ b: z.number() }),
  "z.templateLiteral()": z.templateLiteral(["v", z.number(), z.enum(["a", "b"])]), "z.stringbool()": z.object({ a: z.stringbool({ }) }), "z.json()": z.json(),
  "a recursive object": tree, "z.lazy()": z.lazy(() => z.union([z.string(), z.array(z.string())])), "z.never() in an object": z.object({ a: z.never().optional(), b: z.string() }),
  "z.string().describe()": z.string().describe("d"), "z.string().meta()": z.string().meta({ id: "Named", title: "t" }),
};
const emitted = {};
for (const [name, type] of Object.entries(types)) {
  if (!type) { console.error("not there:", name); continue; }
  try { emitted[name] = z.toJSONSchema(type, { io: "input" }); } catch (error) { console.error(name, String(error).slice(0, 90)); }
}
console.log(JSON.stringify(emitted, null, 1));
