// What a stream adds to a turn: text, reasoning, tool calls, token counts, log-probabilities.

import { ApiError } from './api.js';
import { whole } from './dom.js';

// Greatest number of tokens whose log-probabilities are kept. They are not part of the conversation's file.
const MAX_TOKENS = 20_000;
const MAX_CALLS = 1000;
const probabilities = new WeakMap();

// Log-probabilities of the tokens of a turn: `token`, `logprob`, and the alternatives as `top_logprobs`.
export const tokensOf = (turn) => probabilities.get(turn) ?? [];

export class Answer {
  constructor(turn) {
    this.turn = turn;
    this.start = performance.now();
    this.first = 0;
    // Tokens of the parts before, if the turn is continued.
    this.before = turn.tokens ?? 0;
    turn.end = '';
  }

  // Adds a chunk to the turn. Returns what is new.
  take(chunk) {
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    const { turn } = this;
    if (chunk.usage) {
      turn.tokens = this.before + chunk.usage.completion_tokens;
      turn.total = chunk.usage.total_tokens;
    }
    const choice = chunk.choices?.[0];
    if (!choice) return null;
    const { content = '', reasoning_content, reasoning, tool_calls } = choice.delta ?? {};
    const thoughts = reasoning_content ?? reasoning ?? '';
    turn.content += content ?? '';
    if (thoughts) turn.thoughts = (turn.thoughts ?? '') + thoughts;
    const calls = (tool_calls ?? []).map((part) => this.call(part)).filter(Boolean);
    if (choice.finish_reason) turn.end = choice.finish_reason;
    const tokens = this.tokens(choice.logprobs?.content ?? []);
    if (!this.first && (content || thoughts || tool_calls)) this.first = performance.now();
    return { content: content ?? '', thoughts, tokens, calls };
  }

  // Calls follow one another: a part is of the last one, or begins the next.
  call({ index = 0, id, function: { name, arguments: text = '' } = {} }) {
    const calls = (this.turn.calls ??= []);
    if (index > calls.length || index >= MAX_CALLS) return null;
    calls[index] ??= { id: id ?? `call-${index}`, name: name ?? '', text: '' };
    calls[index].text += text;
    return { index, name: calls[index].name, text };
  }

  tokens(entries) {
    const kept = probabilities.get(this.turn) ?? [];
    const fresh = entries.slice(0, MAX_TOKENS - kept.length);
    kept.push(...fresh);
    if (kept.length) probabilities.set(this.turn, kept);
    return fresh;
  }

  get isEmpty() {
    const { content, thoughts, calls } = this.turn;
    return !content && !thoughts && !calls;
  }

  finish() {
    const { turn } = this;
    if (this.first) turn.wait = Math.round(this.first - this.start);
    turn.took = Math.round(performance.now() - this.start);
    if (this.before) turn.wait = undefined;
  }
}

// The line below an answer.
export function summary({ tokens, wait, took, end }) {
  const parts = [];
  if (tokens) parts.push(`${whole(tokens)} tokens`);
  if (tokens && took && wait !== undefined) parts.push(`${whole(tokens / (took / 1000))} tok/s`);
  if (wait !== undefined) parts.push(`first token after ${wait} ms`);
  if (end === 'length') parts.push('token limit reached');
  if (end === 'stopped') parts.push('stopped');
  if (end === 'failed') parts.push('ended by an error');
  return parts.join(' · ');
}
