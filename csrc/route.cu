// Exchanges the routing of all ranks and decides where every row goes.
//
// Publish: each rank writes its expert ids into the buffers of all ranks, in words that tell whether they have arrived.
// Count: thread blocks cut the tokens of all ranks into contiguous pieces and count the pairs for each local expert.
// Place: once all blocks of this rank have told each other their counts, every pair knows how many pairs of its expert
// come before it, hence its row: a stable counting sort by (expert, source rank, token, column), the same on every run.
#include "schedule.h"
#include "sync.cuh"

namespace ncclep {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
// In place of a row; they sort behind all rows.
constexpr int kDropped = INT32_MAX - 1, kNotHere = INT32_MAX;

__device__ int load_id(const RouteParams& p, int64_t i) {
  int64_t id;
  switch (p.id_bytes) {
    case 1: id = static_cast<const int8_t*>(p.topk_idx)[i]; break;
    case 2: id = static_cast<const int16_t*>(p.topk_idx)[i]; break;
    case 4: id = static_cast<const int32_t*>(p.topk_idx)[i]; break;
    default: id = static_cast<const int64_t*>(p.topk_idx)[i];
  }
  return id < INT16_MIN ? INT16_MIN : id > INT16_MAX ? INT16_MAX : int(id);  // still out of range
}

// Ids 4 * v to 4 * v + 3 of this rank, as they are published: two words.
__device__ ulonglong2 pack_ids(const Session& s, const RouteParams& p, int64_t num_ids, int64_t v) {
  uint32_t ids[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) ids[j] = 4 * v + j < num_ids ? uint32_t(load_id(p, 4 * v + j)) & 0xffff : 0xffff;
  return make_ulonglong2(s.tagged(ids[0] | ids[1] << 16), s.tagged(ids[2] | ids[3] << 16));
}

// Writes this rank's ids and its header to all ranks, as soon as they have room.
__device__ void publish(const Session& s, const RouteParams& p) {
  const Workspace& w = s.op.workspace;
  const int64_t num_ids = int64_t(p.plan.num_tokens) * p.plan.top_k;
  const bool fits = p.plan.num_tokens <= p.plan_tokens;  // else the header says so
  const int64_t vectors = fits ? divide_up(num_ids, 4) : 0, stride = int64_t(gridDim.x) * kThreads;
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  ulonglong2 ids = make_ulonglong2(0, 0);
  if (first < vectors) ids = pack_ids(s, p, num_ids, first);
  s.wait_for_credit();  // while the ids are being read
  if (blockIdx.x == gridDim.x - 1)
    for (int i = threadIdx.x; i < w.num_ranks * kTaggedHeaderWords; i += kThreads) {
      const int peer = (s.op.rank + i / kTaggedHeaderWords) % w.num_ranks, word = i % kTaggedHeaderWords;
      const uint32_t half = uint32_t(uint64_t(p.header[word / 2]) >> 32 * (word % 2));
      store_relaxed(s.at<uint64_t>(peer, w.header_of(s.parity, s.op.rank)) + word, s.tagged(half));
    }
  for (int64_t v = first; v < vectors; v += stride) {
    if (v != first) ids = pack_ids(s, p, num_ids, v);
    for (int step = 0; step < w.num_ranks; ++step) {
      const int peer = (s.op.rank + step) % w.num_ranks;
      store_two_relaxed(s.at<uint64_t>(peer, w.routing_of(s.parity, s.op.rank)) + 2 * v, ids);
    }
  }
}

struct Shared {
  int first_token[kMaxRanks + 1];  // of each source in the concatenation of all tokens
  int max_tokens, needs_grad, complaint;
};

// Word `word` of the header of `source`, once it has arrived.
__device__ int64_t header_word(const Session& s, int source, int word) {
  const uint64_t* halves = s.here<uint64_t>(s.op.workspace.header_of(s.parity, source)) + 2 * word;
  const ulonglong2 seen = load_two_relaxed(halves);
  const uint64_t low = s.wait_tagged(halves, seen.x, source, kWaitRouting);
  return int64_t(uint64_t(s.wait_tagged(halves + 1, seen.y, source, kWaitRouting)) << 32 | low);
}

// Reads the headers: token counts, and whether all ranks agree on the call, which is to say with this one.
__device__ void read_headers(const Session& s, const RouteParams& p, Shared& shared) {
  const Workspace& w = s.op.workspace;
  if (threadIdx.x == 0) shared.needs_grad = shared.complaint = 0;
  __syncthreads();
  const int agreed = p.agreed_end - p.agreed_begin, words = agreed + 3;
  for (int i = threadIdx.x; i < w.num_ranks * words; i += blockDim.x) {
    const int source = i / words, which = i % words;
    const int word = which < agreed        ? p.agreed_begin + which
                     : which == agreed     ? p.tokens_word
                     : which == agreed + 1 ? p.refused_word
                                           : p.needs_grad_word;
    const int64_t value = header_word(s, source, word);
    if (which < agreed) {
      if (value != p.header[word]) shared.complaint = 1;
    } else if (which == agreed) {
      shared.first_token[source + 1] = value < 0 || value > INT32_MAX ? INT32_MAX : int(value);
    } else if (value) {
      (which == agreed + 1 ? shared.complaint : shared.needs_grad) = 1;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int total = 0, most = 0;
    shared.first_token[0] = 0;
    for (int source = 0; source < w.num_ranks; ++source) {
      const int tokens = shared.first_token[source + 1];
      most = max(most, tokens);
      if (tokens <= p.plan_tokens) total += tokens;
      shared.first_token[source + 1] = total;
    }
    shared.max_tokens = most;
  }
  __syncthreads();
}

// Called by a warp: ids `from` to `from` + n of `source` to `ids`, once they have arrived.
__device__ void read_ids(const Session& s, int source, int64_t from, int n, int32_t* ids) {
  constexpr int kInFlight = 8;
  const uint64_t* words = s.here<uint64_t>(s.op.workspace.routing_of(s.parity, source)) + from / 2;
  const int skip = int(from & 1), num_words = (skip + n + 1) / 2;
  for (int base = threadIdx.x % 32; base < num_words; base += 32 * kInFlight) {
    uint64_t seen[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) seen[j] = load_relaxed(words + min(base + 32 * j, num_words - 1));
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int word = base + 32 * j;
      if (word >= num_words) break;
      const uint32_t two = s.wait_tagged(words + word, seen[j], source, kWaitRouting);
      const int first = 2 * word - skip;
      if (first >= 0) ids[first] = int16_t(two & 0xffff);
      if (first + 1 < n) ids[first + 1] = int16_t(two >> 16);
    }
  }
}

// Walks the tokens [begin, end) of the concatenation, at most 32 of one source at a time. `visit(source, token, n)`
// is called by a whole warp, which finds their ids [n, K] in `ids`: read together, since one by one each would cost the
// latency of memory. `again`: after an earlier walk, whose last ids still lie there.
template <class Visit>
__device__ void for_batches(const Session& s, const Shared& shared, int top_k, int begin, int end, int32_t* ids,
                            bool again, Visit visit) {
  const int start = begin;
  const int num_ranks = s.op.workspace.num_ranks;
  int source = 0;
  while (begin < end) {
    while (source + 1 < num_ranks && shared.first_token[source + 1] <= begin) ++source;
    const int limit = min(min(end, shared.first_token[source + 1]), begin + 32);
    const int first = begin - shared.first_token[source], pairs = (limit - begin) * top_k;
    const bool here = again && begin == start && limit == end;
    if (!here) read_ids(s, source, int64_t(first) * top_k, pairs, ids);
    __syncwarp();
    visit(source, first, limit - begin);
    __syncwarp();
    begin = limit;
  }
}

// Ranks of one token, ascending, in a bit mask.
struct RankSet {
  uint32_t words[3] = {0, 0, 0};
  __device__ void add(int rank) {
    if (rank < 32) words[0] |= 1u << rank;
    else if (rank < 64) words[1] |= 1u << (rank - 32);
    else words[2] |= 1u << (rank - 64);
  }
  __device__ int size() const { return __popc(words[0]) + __popc(words[1]) + __popc(words[2]); }
  __device__ int pop() {
    for (int i = 0; i < 3; ++i)
      if (words[i]) {
        const int bit = __ffs(words[i]) - 1;
        words[i] &= words[i] - 1;
        return 32 * i + bit;
      }
    return kNoRank;
  }
};

// Called by a warp: what the host waits for. `tallies` follow the counts of experts in `totals`.
__device__ void report(const Session& s, const RouteParams& p, const Shared& shared, const int32_t* totals) {
  Report* report = s.op.report;
  for (int e = threadIdx.x % 32; e < p.plan.num_local_experts; e += 32) report->counts[e] = totals[e];
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  const int32_t* tallies = totals + p.plan.num_local_experts;
  report->verdict = s.failed() ? kVerdictFailure : tallies[kBadIds] ? kVerdictComplaint : kVerdictAgreed;
  report->max_tokens = shared.max_tokens;
  report->needs_grad = shared.needs_grad;
  report->remote_tokens = tallies[kRemoteTokens];
  report->remote_pairs = tallies[kRemotePairs];
  store_release(&report->sequence, p.sequence);
}

__global__ void __launch_bounds__(kThreads, 1) route_kernel(const __grid_constant__ RouteParams p) {
  extern __shared__ int32_t dynamic[];
  __shared__ Shared shared;
  const Session s(p.op);
  const Workspace& w = s.op.workspace;
  const Plan& plan = p.plan;
  const int num_local = plan.num_local_experts, top_k = plan.top_k, num_ranks = w.num_ranks, me = s.op.rank;
  const int columns = num_local + kNumTallies;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  int32_t* histogram = dynamic;                          // [kWarps, columns]
  int32_t* totals = histogram + kWarps * columns;        // [columns] of all blocks
  int32_t* before = totals + columns;                    // [columns] of earlier blocks
  int32_t* starts = before + columns;                    // [num_local]
  int32_t* sizes = starts + num_local;                   // [num_local]
  int32_t* pairs = sizes + num_local + warp * 32 * top_k;  // [32, K] of this warp

  s.announce();
  publish(s, p);
  for (int i = threadIdx.x; i < kWarps * columns + 2 * columns; i += kThreads) histogram[i] = 0;
  read_headers(s, p, shared);

  const bool grow = shared.max_tokens > p.plan_tokens;
  const bool exact = p.sequence != 0;
  if (!exact && threadIdx.x == 0 && blockIdx.x == 0) {
    if (shared.complaint) s.fail(kDisagreement, kWaitRouting, me, 0, 0);
    else if (grow) s.fail(kTooManyTokens, kWaitRouting, me, p.plan_tokens, shared.max_tokens);
  }
  const bool ignore = shared.complaint || grow;
  if (ignore && exact) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      s.op.report->verdict = shared.complaint ? kVerdictComplaint : kVerdictGrow;
      s.op.report->max_tokens = shared.max_tokens;
      store_release(&s.op.report->sequence, p.sequence);
    }
    s.finish();
    return;
  }

  // Count. Ids of the ranks' own tokens also tell where these go.
  const Span block_span = even_span(ignore ? 0 : shared.first_token[num_ranks], blockIdx.x, gridDim.x);
  const Span offset = even_span(block_span.end - block_span.begin, warp, kWarps);
  const int begin = block_span.begin + offset.begin, end = block_span.begin + offset.end;
  const int first_expert = me * num_local, ranks_per_token = min(top_k, num_ranks);
  int32_t *my_histogram = histogram + warp * columns, *my_tallies = my_histogram + num_local;
  int remote_tokens = 0, remote_pairs = 0, bad_ids = 0, own_bad_ids = 0;
  for_batches(s, shared, top_k, begin, end, pairs, false, [&](int source, int first, int n) {
    const int32_t* ids = pairs + lane * top_k;
    bool here = false;
    RankSet ranks;
    for (int k = 0; k < top_k && lane < n; ++k) {
      const int id = ids[k], expert = id - first_expert;
      if (expert >= 0 && expert < num_local) {
        atomicAdd(&my_histogram[expert], 1);
        here = true;
      }
      const bool goes = id >= 0 && id < p.num_experts;
      if (source == me) plan.pair_ranks[int64_t(first + lane) * top_k + k] = goes ? uint8_t(id / num_local) : kNoRank;
      if (id < -1 || id >= p.num_experts) {
        ++bad_ids;
        own_bad_ids += source == me;
      } else if (source == me && id >= 0) {
        ranks.add(id / num_local);
        remote_pairs += id / num_local != me;
      }
    }
    const uint32_t items = __ballot_sync(~0u, here);
    if (lane == 0) my_tallies[kItems] += __popc(items);
    if (source == me && lane < n) {
      remote_tokens += ranks.size() - here;
      for (int i = 0; i < ranks_per_token; ++i)
        plan.token_ranks[int64_t(first + lane) * ranks_per_token + i] = uint8_t(ranks.pop());
    }
  });
  if (bad_ids) atomicAdd(&my_tallies[kBadIds], bad_ids);
  if (own_bad_ids) atomicAdd(&my_tallies[kOwnBadIds], own_bad_ids);
  if (remote_tokens) atomicAdd(&my_tallies[kRemoteTokens], remote_tokens);
  if (remote_pairs) atomicAdd(&my_tallies[kRemotePairs], remote_pairs);
  __syncthreads();
  uint64_t* counts = s.here<uint64_t>(w.counts());
  const int stride = int(w.counts_columns());
  for (int c = threadIdx.x; c < columns; c += kThreads) {
    int sum = 0;
    for (int i = 0; i < kWarps; ++i) sum += histogram[i * columns + c];
    store_block_word(&counts[blockIdx.x * stride + c], s.tagged(sum));
  }

  // What all blocks have counted, and how much of it the earlier ones.
  constexpr int kInFlight = 8;
  for (int base = threadIdx.x; base < gridDim.x * columns; base += kInFlight * kThreads) {
    uint64_t seen[kInFlight];
    const uint64_t* words[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int i = min(base + j * kThreads, int(gridDim.x) * columns - 1);
      words[j] = &counts[i / columns * stride + i % columns];
      seen[j] = load_block_word(words[j]);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int i = base + j * kThreads;
      if (i >= gridDim.x * columns) break;
      const int count = int(s.wait_tagged(words[j], seen[j], me, kWaitGrid));
      if (count == 0) continue;
      atomicAdd(&totals[i % columns], count);
      if (i / columns < blockIdx.x) atomicAdd(&before[i % columns], count);
    }
  }
  __syncthreads();
  if (warp == 0) {
    int64_t end_of_zone = 0, valid_rows = 0, num_pairs = 0;
    const int64_t limit = p.rows_per_expert >= 0 ? p.rows_per_expert * num_local
                          : p.budget >= 0        ? p.budget
                                                 : INT64_MAX;
    for (int base = 0; base < num_local; base += 32) {
      const int e = base + lane;
      const int64_t count = e < num_local ? totals[e] : 0;
      int64_t wanted = p.rows_per_expert >= 0 ? p.rows_per_expert : round_up(count, p.alignment);
      if (e >= num_local) wanted = 0;
      int64_t sum = wanted;
      for (int d = 1; d < 32; d <<= 1) {
        const int64_t other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
      }
      const int64_t zone_end = min(end_of_zone + sum, limit), zone_start = min(end_of_zone + sum - wanted, limit);
      const int64_t size = zone_end - zone_start, valid = min(count, size);
      if (e < num_local) {
        starts[e] = int(zone_start);
        sizes[e] = int(size);
        if (blockIdx.x == 0) {
          plan.zone_starts[e] = zone_start;
          plan.zone_sizes[e] = size;
          plan.zone_valid[e] = valid;
        }
      }
      end_of_zone += __shfl_sync(~0u, sum, 31);
      valid_rows += valid;
      num_pairs += count;
    }
    if (blockIdx.x == 0) {
      for (int d = 16; d; d >>= 1) {
        valid_rows += __shfl_down_sync(~0u, valid_rows, d);
        num_pairs += __shfl_down_sync(~0u, num_pairs, d);
      }
      if (lane == 0) {
        *plan.dropped = num_pairs - valid_rows + totals[num_local + kOwnBadIds];
      }
    }
  }
  for (int c = threadIdx.x; c < columns; c += kThreads) {
    int running = before[c];
    for (int i = 0; i < kWarps; ++i) {
      const int count = histogram[i * columns + c];
      histogram[i * columns + c] = running;
      running += count;
    }
  }
  __syncthreads();

  if (exact && blockIdx.x == 0 && warp == kWarps - 1) report(s, p, shared, totals);

  // Place. A source without tokens has no items in any round.
  const int64_t bounds = plan.num_rounds + 1;
  if (blockIdx.x == 0)
    for (int64_t i = threadIdx.x; i < num_ranks * bounds; i += kThreads) {
      const int source = int(i / bounds);
      if (ignore || shared.first_token[source] == shared.first_token[source + 1]) plan.item_starts[i] = 0;
    }
  if (ignore) {
    for (int t = blockIdx.x * kThreads + threadIdx.x; t < plan.num_tokens; t += gridDim.x * kThreads) {
      plan.token_item[t] = -1;
      for (int i = 0; i < ranks_per_token; ++i) plan.token_ranks[int64_t(t) * ranks_per_token + i] = kNoRank;
      for (int k = 0; k < top_k; ++k) plan.pair_ranks[int64_t(t) * top_k + k] = kNoRank;
    }
  }
  for_batches(s, shared, top_k, begin, end, pairs, true, [&](int source, int first, int n) {
    int32_t* row_of_pair = pairs;  // in place of the id
    for (int base = 0; base < n * top_k; base += 32) {
      const int pair = base + lane;
      const int expert = pair < n * top_k ? pairs[pair] - first_expert : -1;
      const bool here = expert >= 0 && expert < num_local;
      const uint32_t same = __match_any_sync(~0u, here ? expert : -1);
      int row = kNotHere;
      int position = 0;
      if (here) position = my_histogram[expert] + __popc(same & ((1u << lane) - 1));
      __syncwarp();
      if (here) {
        row = position < sizes[expert] ? starts[expert] + position : kDropped;
        if (lane == __ffs(same) - 1) my_histogram[expert] += __popc(same);
      }
      if (pair < n * top_k) row_of_pair[pair] = row;
      __syncwarp();
    }
    bool here = false;
    for (int k = 0; k < top_k && lane < n; ++k) here |= row_of_pair[lane * top_k + k] != kNotHere;
    const uint32_t items = __ballot_sync(~0u, here);
    const int first_item = my_tallies[kItems];
    const int my_item = first_item + __popc(items & ((1u << lane) - 1));
    __syncwarp();
    if (lane == 0) my_tallies[kItems] += __popc(items);
    if (lane < n) {
      const int token = first + lane;
      if (here) plan.item_token[my_item] = token;
      if (source == me) plan.token_item[token] = here ? my_item : -1;
      int32_t* round_starts = plan.item_starts + source * bounds;
      if (token % plan.capacity == 0) round_starts[token / plan.capacity] = my_item;
      const int num_tokens = shared.first_token[source + 1] - shared.first_token[source];
      if (token == num_tokens - 1)
        for (int64_t r = token / plan.capacity + 1; r < bounds; ++r) round_starts[r] = my_item + here;
    }
    for (int pair = lane; pair < n * top_k; pair += 32) {
      const int token = pair / top_k, k = pair % top_k;
      if (!(items >> token & 1)) continue;
      const int32_t* rows = row_of_pair + token * top_k;
      const int row = rows[k];
      int place = 0;
      for (int other = 0; other < top_k; ++other)
        place += rows[other] < row || (rows[other] == row && other < k);
      const int64_t at = int64_t(first_item + __popc(items & ((1u << token) - 1))) * top_k + place;
      plan.item_rows[at] = row < kDropped ? row : -1;
      plan.item_columns[at] = row == kNotHere ? kNoColumn : uint8_t(k);
    }
    __syncwarp();
  });
  s.finish();
}

int shared_bytes(const RouteParams& p) {
  const int columns = p.plan.num_local_experts + kNumTallies;
  return 4 * (kWarps * columns + 2 * columns + 2 * p.plan.num_local_experts + kWarps * 32 * p.plan.top_k);
}

}  // namespace
}  // namespace ncclep

extern "C" int ncclep_route(const ncclep::RouteParams* p, cudaStream_t stream) {
  const int bytes = ncclep::shared_bytes(*p);
  cudaError_t error = cudaFuncSetAttribute(ncclep::route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  ncclep::route_kernel<<<p->op.num_ctas, ncclep::kThreads, bytes, stream>>>(*p);
  return cudaGetLastError();
}
