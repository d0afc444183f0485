// What crosses the C boundary. abi.py has the same fields in the same order.
#pragma once
#include "draw.h"
#include "linear.h"

extern "C" {

struct FbLayer {
  const float *attn_norm, *q_norm, *k_norm, *post_attn_norm, *ffn_norm, *post_ffn_norm;  // null where the model has none
  fb::Linear qkv, o, gate_up, down;
  void* cache;
  const float *cos, *sin;  // [positions][rotary/2]
  int window;              // 0 = full attention
  int table;               // which of a sequence's block tables is this layer's
};

struct FbModel {
  int bf16, layers, hidden, heads, kv_heads, head_dim, ffn, rotary, block_size, gelu, max_rows, max_samples;
  float eps, scale, softcap, embed_scale, logit_softcap;
  int kv;  // how the cache is kept (kept.h): 0 as the model computes, 1 Int8, 2 Fp8
  int low_width;  // most numbers of one row's A x; 0: no adapters
  const float* norm;
  fb::Linear embed;  // packed like a linear; rows are gathered from it
  fb::Linear head;
  const FbLayer* layer;
};

struct FbStep {
  int rows, chunks, samples, vocab;
  const int *tokens, *positions;  // [rows]
  const int* slots;               // [tables][rows]
  const int *first, *count;       // [chunks] first row, rows
  const int* table;               // [tables][chunks] where in `blocks` the block table starts
  const int* blocks;                      // all block tables, one after the other
  const int* sample_rows;                 // [samples]
  float* logits;                          // [samples][head.n]
  int* best;                              // [samples] the token; -1 where no logit is above -inf, kNotFinite (draw.h)
  const fb::Choice* choices;              // [samples] how to choose; null: the highest logit's, the first of equals
  const int* lora;                        // [chunks] which of `adapters`, -1: none; not read when `loras` is 0
  const fb::Lora* const* adapters;        // [loras] those of this step, each [layers][kSites]
  int loras, unused;
};
}
