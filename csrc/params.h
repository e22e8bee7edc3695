// Arguments of the kernels: plain structs that the host fills in. The same for C++ and for ctypes.
#pragma once
#include "layout.h"

namespace ncclep {

struct Operation {
  Workspace workspace;
  uint64_t peers[kMaxRanks];  // addresses of all ranks' buffers
  Report* report;  // pinned host memory
  uint64_t timeout_ns;
  int32_t rank;
  int32_t num_ctas;
};

// The routing of one dispatch, as combine and both backward passes read it. V: items, one for every token of any rank
// that has an expert here. All in device memory.
struct Plan {
  int32_t* item_token;   // [V] the token's index on its rank
  int32_t* item_rows;    // [V, K] its rows here, ascending; then -1
  uint8_t* item_columns; // [V, K] the column (k) of each; kNoColumn where there is no pair
  int32_t* item_starts;  // [R, num_rounds + 1] first item of each source and round
  uint8_t* token_ranks;  // [T, min(K, R)] ranks of each token of this rank, ascending; then kNoRank
  uint8_t* pair_ranks;   // [T, K] rank of each pair of this rank, kNoRank for none
  int32_t* token_item;   // [T] item of each token of this rank, -1 for none
  int64_t* zone_starts;  // [L]
  int64_t* zone_sizes;   // [L] pad rows included
  int64_t* zone_valid;   // [L]
  int64_t* dropped;      // [1]
  int64_t num_rows;      // N; unused by route
  int32_t num_tokens;    // T
  int32_t top_k;
  int32_t num_local_experts;
  int32_t capacity;      // tokens of a source that staging holds at a time
  int32_t num_rounds;
  int32_t padding;
};
constexpr int kNoRank = 255, kNoColumn = 255;

struct RouteParams {
  Operation op;
  Plan plan;
  const void* topk_idx;  // [T, K]
  int64_t header[kHeaderWords];  // what this rank publishes beside its ids; the host knows most of its words
  int64_t alignment;
  int64_t budget;           // rows, -1: exact
  int64_t rows_per_expert;  // -1: as many as needed
  uint64_t sequence;        // of the report; 0: do not report
  int32_t id_bytes;         // of one expert id: 1, 2, 4 or 8
  int32_t num_experts;
  int32_t plan_tokens;  // tokens of a source that the plan has room for
  // Positions in the header: refusal (not 0: this rank's call is wrong), whether a gradient is needed, number of
  // tokens, and the words that must be equal on all ranks.
  int32_t refused_word, needs_grad_word, tokens_word, agreed_begin, agreed_end;
};

struct DispatchParams {
  Operation op;
  Plan plan;
  const char* x;       // [T, row_bytes]
  const float* probs;  // [T, K] or null
  char* rows;          // [N, row_bytes], or FP8 values [N, H]
  float* scales;       // [N, ceil(H / 128)] of FP8 rows, else null
  float* row_probs;    // [N], null without probs
  int64_t row_bytes;   // of x
  int32_t hidden;
  int32_t dtype;         // DataType of x
  int32_t fp8;           // payload
  int32_t power_of_two;  // scales
  int32_t send_ctas;
  int32_t padding;
};

struct CombineParams {
  Operation op;
  Plan plan;
  const char* rows;        // [N, row_bytes]
  const float* row_probs;  // [N] or null
  char* y;                 // [T, row_bytes]
  float* pair_probs;       // [T, K], null without row_probs
  int64_t row_bytes;
  int32_t dtype;
  int32_t padding;
};

enum DataType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

}  // namespace ncclep
