/** What the server samples with where a request says nothing: the one place that knows where this is written. */

const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0, min_p: 0 };

/** Of a model of `/v1/models`, else of the server's `/stats`, else what OpenAI's API has. */
export function samplingDefaults(model, stats) {
  const said = model?.default_sampling_params ?? stats?.sampling_defaults ?? {};
  const known = Object.keys(NEUTRAL).filter((name) => Number.isFinite(said[name]));
  const found = { ...NEUTRAL, ...Object.fromEntries(known.map((name) => [name, said[name]])) };
  // vLLM writes -1 where everything is kept.
  return { ...found, top_k: Math.max(0, found.top_k) };
}
