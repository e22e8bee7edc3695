// Combine: sums the rows of every token, in fixed order.
//
// Each rank adds a token's rows in float32 in ascending row (hence expert), rounds the sum once and writes it into the
// staging of the token's rank; that rank adds the partial sums in float32 in ascending rank, its own among them. Warps
// of every thread block do either; a flag for each token and segment of a row connects them, so that the second sum
// follows the first while later ones are still under way.
#include "numbers.cuh"
#include "schedule.h"
#include "sync.cuh"

namespace ncclep {
namespace {

constexpr int kPartialsAtOnce = 2;

struct Segment {
  int first, end;  // vectors of the row
  NCCLEP_HD Segment(int64_t row_bytes, int index) {
    const int vectors = int(row_bytes / kVectorBytes), length = segment_vectors(row_bytes);
    first = index * length;
    end = first + length < vectors ? first + length : vectors;
  }
};

template <class T>
using Sum = float[Vector<T>::kSize];

template <class T>
__device__ __forceinline__ void add(Sum<T>& sum, const uint4& data) {
  float values[Vector<T>::kSize];
  unpack(data, values, T());
#pragma unroll
  for (int j = 0; j < Vector<T>::kSize; ++j) sum[j] = __fadd_rn(sum[j], values[j]);
}

// The vectors of a segment that a lane handles at once: kColumns of them, 32 apart.
template <int kColumns>
struct Columns {
  int64_t offset;  // of the first in the row, in bytes
  bool inside[kColumns];
  __device__ Columns(const Segment& segment, int first) {
    const int v = first + threadIdx.x % 32;
    offset = int64_t(v) * kVectorBytes;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) inside[c] = v + 32 * c < segment.end;
  }
  static constexpr int kStride = 32 * kVectorBytes;
};

// Adds `count` rows, whose indices the lanes hold, in their order, kRows at a time.
template <class T, int kColumns, int kRows>
__device__ __forceinline__ void add_rows(Sum<T> (&sum)[kColumns], const char* rows, int64_t row_bytes, int row,
                                         int count, const Columns<kColumns>& columns) {
  for (int first = 0; first < count; first += kRows) {
    uint4 data[kRows][kColumns];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const char* source = rows + __shfl_sync(~0u, row, first + i) * row_bytes + columns.offset;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        data[i][c] = load_if(source + c * columns.kStride, columns.inside[c] && first + i < count);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (first + i < count)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) add<T>(sum[c], data[i][c]);
  }
}

// This lane's row of item `item`, -1 for none.
__device__ __forceinline__ int row_of(const Plan& plan, int item) {
  const int lane = threadIdx.x % 32;
  return lane < plan.top_k ? plan.item_rows[int64_t(item) * plan.top_k + lane] : -1;
}

template <class T, int kColumns, int kRows>
__device__ __forceinline__ void sum_segment(const CombineParams& p, int row, int count, const Segment& segment,
                                            char* target) {
  for (int v = segment.first; v < segment.end; v += 32 * kColumns) {
    const Columns<kColumns> columns(segment, v);
    Sum<T> sum[kColumns] = {};
    add_rows<T, kColumns, kRows>(sum, p.rows, p.row_bytes, row, count, columns);
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (columns.inside[c])
        *reinterpret_cast<uint4*>(target + columns.offset + c * columns.kStride) = pack(sum[c], T());
  }
}

template <class T>
__device__ void sum_for_peers(const Session& s, const CombineParams& p, int worker, int workers) {
  const Plan& plan = p.plan;
  const Workspace& w = s.op.workspace;
  const int lane = threadIdx.x % 32, segments = num_segments(p.row_bytes);
  const int64_t slot = slot_bytes(p.row_bytes, plan.top_k);
  ItemWalk walk{plan.item_starts, uint32_t(w.num_ranks), uint32_t(plan.num_rounds), uint32_t(s.op.rank),
                uint32_t(worker), uint32_t(workers), uint32_t(segments)};
  // The next unit's place is read while this one is summed.
  int home, item, index, token = 0, row = -1;
  auto look_up = [&] {
    token = plan.item_token[item];
    row = row_of(plan, item);
  };
  bool more = walk.next(home, item, index);
  if (more) look_up();
  while (more) {
    const int my_home = home, my_item = item, my_index = index, my_token = token, my_row = row;
    more = walk.next(home, item, index);
    if (more) look_up();

    const int round = my_token / plan.capacity, place = my_token % plan.capacity;
    if (round > 0) {
      if (lane == 0)
        s.wait(s.here<uint64_t>(w.credits()) + my_home, make_stamp(s.epoch, round), my_home, kWaitDrain);
      __syncwarp();
    }
    char* target = s.at<char>(my_home, w.staging_of(s.parity, s.op.rank)) + place * slot;
    if (p.row_probs && my_index == 0 && lane < plan.top_k) {
      const int column = plan.item_columns[int64_t(my_item) * plan.top_k + lane];
      if (column != kNoColumn)
        reinterpret_cast<float*>(target + p.row_bytes)[column] = my_row >= 0 ? p.row_probs[my_row] : 0;
    }
    const Segment segment(p.row_bytes, my_index);
    const int count = __popc(__ballot_sync(~0u, my_row >= 0));
    if (count <= 4) sum_segment<T, 2, 4>(p, my_row, count, segment, target);
    else sum_segment<T, 1, 8>(p, my_row, count, segment, target);
    __syncwarp();
    if (lane == 0)
      store_release(s.at<uint64_t>(my_home, w.flags_of(s.parity, s.op.rank)) + int64_t(place) * segments + my_index,
                    make_stamp(s.epoch, round));
  }
}

// What the home rank adds up for one token: its own rows, and partial sums of the peers whose ranks the first lanes
// hold, ascending; its own sum comes after `before` of them.
struct Contributions {
  int row, rows, rank, partials, before;
  bool own;
};

template <int kColumns>
__device__ __forceinline__ void load_partials(const Session& s, uint4 (&data)[kPartialsAtOnce][kColumns],
                                              const Contributions& from, int first, int64_t in_staging,
                                              const Columns<kColumns>& columns) {
#pragma unroll
  for (int i = 0; i < kPartialsAtOnce; ++i) {
    const int rank = __shfl_sync(~0u, from.rank, first + i) & 127;
    const char* source = s.here<char>(s.op.workspace.staging_of(s.parity, rank)) + in_staging + columns.offset;
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      data[i][c] = load_arrived_if(source + c * columns.kStride, columns.inside[c] && first + i < from.partials);
  }
}

template <class T, int kColumns, int kRows>
__device__ __forceinline__ void finish_segment(const Session& s, const CombineParams& p, const Contributions& from,
                                               const Segment& segment, int64_t in_staging, char* target) {
  for (int v = segment.first; v < segment.end; v += 32 * kColumns) {
    const Columns<kColumns> columns(segment, v);
    uint4 partials[kPartialsAtOnce][kColumns];
    load_partials(s, partials, from, 0, in_staging, columns);
    uint4 own[kColumns];
    if (from.own) {
      Sum<T> sum[kColumns] = {};
      add_rows<T, kColumns, kRows>(sum, p.rows, p.row_bytes, from.row, from.rows, columns);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) own[c] = pack(sum[c], T());  // rounded as if it had travelled
    }
    Sum<T> sum[kColumns] = {};
    for (int first = 0;; first += kPartialsAtOnce) {
#pragma unroll
      for (int i = 0; i < kPartialsAtOnce; ++i) {
        if (first + i == from.before && from.own)
#pragma unroll
          for (int c = 0; c < kColumns; ++c) add<T>(sum[c], own[c]);
        if (first + i < from.partials)
#pragma unroll
          for (int c = 0; c < kColumns; ++c) add<T>(sum[c], partials[i][c]);
      }
      if (first + kPartialsAtOnce > from.partials) break;  // `before` was among these
      load_partials(s, partials, from, first + kPartialsAtOnce, in_staging, columns);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (columns.inside[c])
        *reinterpret_cast<uint4*>(target + columns.offset + c * columns.kStride) = pack(sum[c], T());
  }
}

template <class T>
__device__ void sum_at_home(const Session& s, const CombineParams& p, int worker, int workers) {
  const Plan& plan = p.plan;
  const Workspace& w = s.op.workspace;
  const int lane = threadIdx.x % 32, segments = num_segments(p.row_bytes);
  const int ranks_per_token = min(plan.top_k, w.num_ranks);
  const int64_t slot = slot_bytes(p.row_bytes, plan.top_k);
  const int64_t units = int64_t(plan.num_tokens) * segments;
  int next_item = -1, next_rank = kNoRank;
  auto look_up = [&](int64_t unit) {
    if (unit >= units) return;
    const int64_t token = unit / segments;
    next_item = plan.token_item[token];
    next_rank = lane < ranks_per_token ? plan.token_ranks[token * ranks_per_token + lane] : kNoRank;
  };
  look_up(worker);
  for (int64_t unit = worker; unit < units; unit += workers) {
    const int token = int(unit / segments), index = int(unit % segments);
    const int round = token / plan.capacity, place = token % plan.capacity;
    const int item = next_item;
    Contributions from{-1, 0, next_rank, 0, 0, item >= 0};
    if (from.own) from.row = row_of(plan, item);
    look_up(unit + workers);

    const uint32_t lower = __ballot_sync(~0u, from.rank < s.op.rank);
    const uint32_t higher = __ballot_sync(~0u, from.rank > s.op.rank && from.rank != kNoRank);
    from.before = __popc(lower);
    from.partials = from.before + __popc(higher);
    const int following = __shfl_down_sync(~0u, from.rank, 1);
    if (from.own && lane >= from.before) from.rank = lane == 31 ? kNoRank : following;  // closes this rank's gap
    if (lane < from.partials)
      s.wait(s.here<uint64_t>(w.flags_of(s.parity, from.rank)) + int64_t(place) * segments + index,
             make_stamp(s.epoch, round), from.rank, kWaitPartials);
    __syncwarp();

    const int64_t in_staging = place * slot;
    const Segment segment(p.row_bytes, index);
    char* target = p.y + token * p.row_bytes;
    from.rows = __popc(__ballot_sync(~0u, from.row >= 0));
    if (from.rows <= 4) finish_segment<T, 2, 4>(s, p, from, segment, in_staging, target);
    else finish_segment<T, 1, 8>(s, p, from, segment, in_staging, target);

    if (p.row_probs && index == 0 && lane < plan.top_k) {
      const int64_t pairs = int64_t(token) * plan.top_k;
      const int rank = plan.pair_ranks[pairs + lane];
      if (rank != s.op.rank)
        p.pair_probs[pairs + lane] =
            rank == kNoRank ? 0
                            : reinterpret_cast<const float*>(s.here<char>(w.staging_of(s.parity, rank)) + in_staging +
                                                             p.row_bytes)[lane];
      const int column = from.own ? plan.item_columns[int64_t(item) * plan.top_k + lane] : kNoColumn;
      if (column != kNoColumn) p.pair_probs[pairs + column] = from.row >= 0 ? p.row_probs[from.row] : 0;
    }
    if (plan.num_rounds > 1) {
      __syncwarp();
      if (lane == 0) {
        __threadfence();
        const uint32_t done = atomicAdd(&s.control()->drained[0], 1u) + 1;
        if (done == uint32_t(round + 1) * plan.capacity * segments)
          for (int peer = 0; peer < w.num_ranks; ++peer)
            store_release(s.at<uint64_t>(peer, w.credits()) + s.op.rank, make_stamp(s.epoch, round + 1));
      }
    }
  }
}

template <class T, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 1) combine_kernel(const __grid_constant__ CombineParams p) {
  const Session s(p.op);
  s.announce();
  s.wait_for_credit();
  const int warp = threadIdx.x / 32;
  // Warps of one rank in the group's order: neighbours in different blocks.
  const int sum_warps = p.sum_warps & 255, final_warps = kWarps - sum_warps, blocks = gridDim.x;
  if (warp < sum_warps) sum_for_peers<T>(s, p, blockIdx.x * sum_warps + warp, blocks * sum_warps);
  else sum_at_home<T>(s, p, blockIdx.x * final_warps + warp - sum_warps, blocks * final_warps);
  s.finish(p.y, p.plan.num_tokens * p.row_bytes);
}

template <class T>
int launch(const CombineParams& p, cudaStream_t stream) {
  switch (p.sum_warps >> 8) {
    case 16: combine_kernel<T, 16><<<p.op.num_ctas, 32 * 16, 0, stream>>>(p); break;
    case 20: combine_kernel<T, 20><<<p.op.num_ctas, 32 * 20, 0, stream>>>(p); break;
    case 32: combine_kernel<T, 32><<<p.op.num_ctas, 32 * 32, 0, stream>>>(p); break;
    default: combine_kernel<T, 24><<<p.op.num_ctas, 32 * 24, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace ncclep

extern "C" int ncclep_combine(const ncclep::CombineParams* p, cudaStream_t stream) {
  switch (p->dtype) {
    case ncclep::kFloat32: return ncclep::launch<float>(*p, stream);
    case ncclep::kBFloat16: return ncclep::launch<__nv_bfloat16>(*p, stream);
    case ncclep::kFloat16: return ncclep::launch<__half>(*p, stream);
  }
  return cudaErrorInvalidValue;
}
