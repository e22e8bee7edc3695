// Exchanges the routing of all ranks and decides where every row goes.
//
// Publish: each rank writes its expert ids into the buffers of all ranks. Count: thread blocks cut the tokens of all
// ranks into contiguous pieces and count the pairs for each local expert. Place: once all blocks of this rank have told
// each other their counts, every pair knows how many pairs of its expert come before it, hence its row: a stable
// counting sort by (expert, source rank, token, column), the same on every run.
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

// 8 ids of this rank, from id 8 * v on, as they are published.
__device__ uint4 pack_ids(const RouteParams& p, int64_t num_ids, int v) {
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int64_t i = int64_t(v) * 8 + 2 * j;
    const uint32_t low = i < num_ids ? load_id(p, i) : -1, high = i + 1 < num_ids ? load_id(p, i + 1) : -1;
    words[j] = (low & 0xffff) | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Writes slices of this rank's ids and, with the first, its header to all ranks, as soon as they have room.
__device__ void publish(const Session& s, const RouteParams& p) {
  const Workspace& w = s.op.workspace;
  const int64_t num_ids = int64_t(p.plan.num_tokens) * p.plan.top_k;
  const bool fits = p.plan.num_tokens <= p.plan_tokens;  // else the header says so
  const int64_t vectors = fits ? divide_up(num_ids, 8) : 0;
  bool have_room = false;
  for (int slice = blockIdx.x; slice < kPublishSlices; slice += gridDim.x) {
    const Span span = even_span(vectors, slice, kPublishSlices);
    uint4 ids = make_uint4(0, 0, 0, 0);
    const int first = span.begin + threadIdx.x;
    if (first < span.end) ids = pack_ids(p, num_ids, first);
    if (!have_room) s.wait_for_credit();  // while the ids are being read
    have_room = true;
    for (int v = first; v < span.end; v += blockDim.x) {
      if (v != first) ids = pack_ids(p, num_ids, v);
      for (int step = 0; step < w.num_ranks; ++step) {
        const int peer = (s.op.rank + step) % w.num_ranks;
        s.at<uint4>(peer, w.routing_of(s.parity, s.op.rank))[v] = ids;
      }
    }
    if (slice == 0)
      for (int i = threadIdx.x; i < w.num_ranks * kHeaderWords; i += blockDim.x)
        s.at<int64_t>(i / kHeaderWords, w.header_of(s.parity, s.op.rank))[i % kHeaderWords] =
            p.header[i % kHeaderWords];
    __syncthreads();
    for (int peer = threadIdx.x; peer < w.num_ranks; peer += blockDim.x)
      store_release(s.at<uint64_t>(peer, w.publish_flags_of(s.parity, s.op.rank)) + slice, s.epoch);
  }
}

__device__ void wait_for_all(const Session& s) {
  const Workspace& w = s.op.workspace;
  for (int i = threadIdx.x; i < w.num_ranks * kPublishSlices; i += blockDim.x)
    s.wait(s.here<uint64_t>(w.publish_flags_of(s.parity, 0)) + i, s.epoch, i / kPublishSlices, kWaitRouting);
  __syncthreads();
}

struct Shared {
  int first_token[kMaxRanks + 1];  // of each source in the concatenation of all tokens
  int max_tokens, needs_grad, complaint;
};

// Reads the headers: token counts, and whether all ranks agree on the call.
__device__ void read_headers(const Session& s, const RouteParams& p, Shared& shared) {
  const Workspace& w = s.op.workspace;
  const int64_t* headers = s.here<int64_t>(w.header_of(s.parity, 0));
  if (threadIdx.x == 0) shared.needs_grad = shared.complaint = 0;
  __syncthreads();
  const int agreed = p.agreed_end - p.agreed_begin;
  for (int i = threadIdx.x; i < w.num_ranks * agreed; i += blockDim.x) {
    const int source = i / agreed, word = i % agreed + p.agreed_begin;
    if (headers[source * kHeaderWords + word] != headers[word]) shared.complaint = 1;
  }
  for (int source = threadIdx.x; source < w.num_ranks; source += blockDim.x) {
    const int64_t* header = headers + source * kHeaderWords;
    const int64_t tokens = header[p.tokens_word];
    shared.first_token[source + 1] = tokens < 0 || tokens > INT32_MAX ? INT32_MAX : int(tokens);
    if (header[p.refused_word]) shared.complaint = 1;
    if (header[p.needs_grad_word]) shared.needs_grad = 1;
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

// Walks the tokens [begin, end) of the concatenation, at most 32 of one source at a time. `visit(source, token, n)`
// is called by a whole warp, which finds their ids [n, K] in `ids`: read together, since one by one each would cost the
// latency of memory. `again`: after an earlier walk, whose last ids still lie there.
template <class Visit>
__device__ void for_batches(const Session& s, const Shared& shared, int top_k, int begin, int end, int32_t* ids,
                            bool again, Visit visit) {
  const int start = begin;
  const int num_ranks = s.op.workspace.num_ranks, lane = threadIdx.x % 32;
  int source = 0;
  while (begin < end) {
    while (source + 1 < num_ranks && shared.first_token[source + 1] <= begin) ++source;
    const int limit = min(min(end, shared.first_token[source + 1]), begin + 32);
    const int first = begin - shared.first_token[source], pairs = (limit - begin) * top_k;
    const int16_t* published = s.here<int16_t>(s.op.workspace.routing_of(s.parity, source)) + int64_t(first) * top_k;
    const bool here = again && begin == start && limit == end;
#pragma unroll 8
    for (int i = lane; i < pairs && !here; i += 32) ids[i] = published[i];
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
  wait_for_all(s);
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
      const int count = int(s.wait_tagged(words[j], seen[j]));
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
