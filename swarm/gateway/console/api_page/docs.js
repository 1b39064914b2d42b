// The HTTP API as this gateway describes it in /openapi.json: operations, with what they take and return.

import { Api } from "./api.js";
import { askForKey } from "./dialogs.js";
import { fill, h } from "./dom.js";

const MOST_DEPTH = 4; // nested schemas that are shown

const api = new Api();
const root = document.getElementById("api");
api.onRefused = (words) => askForKey(api, words, show);

async function show() {
  try {
    const document = await api.get("/openapi.json");
    fill(root, ...pageOf(document));
  } catch (error) {
    if (error.name !== "ApiError") throw error;
    fill(root, h("p", { class: "problem", role: "alert" }, error.message));
  }
}

function pageOf(document) {
  const { title, version } = document.info;
  const operations = Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => operationOf(document, path, method, operation)),
  );
  return [
    h("h2", {}, `${title} ${version}: HTTP API`),
    h("p", {}, "Also as ", h("a", { href: "/openapi.json" }, "openapi.json"), ", for programs."),
    ...operations,
  ];
}

function operationOf(document, path, method, operation) {
  const { summary = "", description = "", parameters = [], requestBody, responses } = operation;
  const body = requestBody?.content?.["application/json"]?.schema;
  const statuses = Object.entries(responses ?? {});
  return h(
    "details",
    { class: "operation card" },
    h(
      "summary",
      {},
      h("span", { class: "method mono" }, method.toUpperCase()),
      h("span", { class: "mono" }, path),
      h("span", { class: "hint" }, description || summary),
    ),
    parameters.length > 0 ? [h("h3", {}, "Parameters"), parameterList(document, parameters)] : null,
    body ? [h("h3", {}, "Body"), schemaOf(document, body, 0)] : null,
    h("h3", {}, "Responses"),
    h("dl", { class: "properties" }, statuses.map(([status, response]) => responseOf(document, status, response))),
  );
}

const parameterList = (document, parameters) =>
  h(
    "dl",
    { class: "properties" },
    parameters.map(({ name, in: where, schema = {}, description = "" }) => [
      h("dt", {}, h("code", {}, name), ` ${typeOf(document, schema)}, in the ${where}`),
      h("dd", {}, description),
    ]),
  );

const responseOf = (document, status, { description = "", content = {} }) => [
  h("dt", {}, h("code", {}, status), ` ${Object.keys(content).join(", ")}`),
  h("dd", {}, description),
];

// The properties of an object, in a list; those of nested ones below them.
function schemaOf(document, given, depth) {
  const schema = resolved(document, given);
  const properties = Object.entries(schema.properties ?? {});
  if (properties.length === 0) return h("p", { class: "hint" }, typeOf(document, given));
  return h(
    "dl",
    { class: "properties" },
    properties.map(([name, property]) => {
      const nested = innerOf(document, property);
      const isRequired = schema.required?.includes(name) ? ", required" : "";
      return [
        h("dt", {}, h("code", {}, name), ` ${typeOf(document, property)}${isRequired}`),
        h(
          "dd",
          {},
          property.description ?? resolved(document, property).description ?? "",
          nested && depth < MOST_DEPTH ? schemaOf(document, nested, depth + 1) : null,
        ),
      ];
    }),
  );
}

// The object in a property or in its list's items, if there is one.
function innerOf(document, property) {
  const { items, anyOf = [] } = property;
  const options = [property, items, ...anyOf, ...anyOf.map((one) => one.items)];
  return options.filter(Boolean).find((one) => resolved(document, one).properties);
}

function resolved(document, schema) {
  if (!schema?.$ref) return schema ?? {};
  return document.components?.schemas?.[schema.$ref.split("/").at(-1)] ?? {};
}

function typeOf(document, schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return [...new Set(schema.anyOf.map((one) => typeOf(document, one)))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(document, schema.items ?? {})}`;
  return schema.type ?? "any";
}

show();
