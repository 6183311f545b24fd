/** Numbers, times and counts in words. */

export const whole = (number) => Math.round(number).toLocaleString("en");
export const short = (number) => (number < 10 && number % 1 ? number.toFixed(1) : whole(number));
export const percent = (part) => `${(part * 100).toFixed(part > 0 && part < 0.0995 ? 1 : 0)}%`;

/** `1 token`, `2 tokens`. */
export function plural(count, one, many = `${one}s`) {
  return `${whole(count)} ${Math.round(count) === 1 ? one : many}`;
}

export function seconds(time) {
  if (time === 0) return "0";
  if (time < 0.0995) return `${(time * 1000).toFixed(time < 0.00995 ? 1 : 0)} ms`;
  return time < 9.95 ? `${time.toFixed(2)} s` : `${time.toFixed(0)} s`;
}

/** A number of bytes and its unit. */
export function bytes(count) {
  if (count < 2 ** 10) return [whole(count), "B"];
  if (count < 2 ** 20) return [whole(count / 2 ** 10), "KiB"];
  const gib = count / 2 ** 30;
  return gib >= 1 ? [gib.toFixed(1), "GiB"] : [whole(count / 2 ** 20), "MiB"];
}

export function longTime(time) {
  const [days, hours, minutes] = [Math.floor(time / 86400), Math.floor(time / 3600) % 24, Math.floor(time / 60) % 60];
  if (days > 0) return `${days} d ${hours} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  return minutes > 0 ? `${minutes} min ${Math.floor(time % 60)} s` : `${Math.floor(time)} s`;
}

/** Under which heading a moment is listed. */
export function day(time, now = Date.now()) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  if (time >= midnight) return "Today";
  if (time >= midnight - 86_400_000) return "Yesterday";
  return time >= midnight - 6 * 86_400_000 ? "The last 7 days" : "Older";
}
