/** An answer under way: streams from the server into a message of a conversation, whoever looks at it. */

import { chat } from "./api.js";
import { explain } from "./errors.js";

export class Run {
  /** `changed(run)` is called for every piece, and once more at the end. */
  constructor(conversation, node, body, changed) {
    Object.assign(this, { conversation, node, body, changed });
    this.stopper = new AbortController();
    this.started = performance.now();
    this.firstToken = null;
    this.ended = false;
  }

  stop() {
    this.stopper.abort();
  }

  async go() {
    const { node } = this;
    try {
      for await (const event of chat(this.body, this.stopper.signal)) {
        this.take(event);
        this.changed(this);
      }
      node.finish = node.finish === "running" ? "stop" : node.finish;
    } catch (error) {
      if (this.stopper.signal.aborted) {
        node.finish = "stopped";
      } else {
        node.finish = "failed";
        node.error = explain(error);
      }
    }
    this.ended = true;
    this.changed(this);
  }

  take(event) {
    const { node } = this;
    const now = performance.now();
    const before = node.numTokens ?? 0;
    node.numTokens = event.usage?.completion_tokens ?? before;
    node.numPromptTokens = event.usage?.prompt_tokens ?? node.numPromptTokens;
    node.numCachedTokens = event.usage?.prompt_tokens_details?.cached_tokens ?? node.numCachedTokens;
    for (const choice of event.choices ?? []) {
      this.takeDelta(choice.delta ?? {}, now);
      node.finish = choice.finish_reason ?? node.finish;
    }
    if (node.numTokens > before) {
      this.firstToken ??= now;
      node.firstTokenMs = this.firstToken - this.started;
      node.writingMs = now - this.firstToken;
    }
  }

  takeDelta(delta, now) {
    const { node } = this;
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (reasoning) {
      node.reasoning = (node.reasoning ?? "") + reasoning;
      node.thinkingMs = now - this.started;
    }
    node.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) {
      node.toolCalls ??= [];
      const index = Math.min(call.index ?? 0, node.toolCalls.length);
      const known = (node.toolCalls[index] ??= { id: "", name: "", arguments: "" });
      known.id += call.id ?? "";
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
  }
}
