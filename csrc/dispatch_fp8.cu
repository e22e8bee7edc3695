// Dispatch with an FP8 payload: rows are quantised while they are sent, and delivered either in their own dtype or as
// they travelled.
//
// A third of the thread blocks quantise and send; in the others some warps place this rank's own tokens, rounded as if
// they had travelled, some place what arrives, and one zeroes pad rows. Every warp has buffers of its own and handles
// one row at a time: many warps hide the latency.
#include "fp8.cuh"
#include "items.cuh"

namespace ncclep {
namespace {

constexpr int kMaxWarps = 14;
constexpr int kSharedBytes = 227 * 1024 - 8 * 1024;  // of a block on Hopper and Blackwell, less the static part

// Buffers of a warp: two records, or one and a restored row, whichever is more.
struct Buffers {
  int record_bytes, row_bytes, warps;
  bool restore;
  NCCLEP_HD Buffers(int hidden, int top_k, int64_t plain_row_bytes, bool restore_rows) : restore(restore_rows) {
    record_bytes = int(round_up(Record(hidden, top_k).bytes, 128));
    row_bytes = restore ? int(round_up(plain_row_bytes, 128)) : 0;
    warps = kSharedBytes / bytes_of_warp();
    if (warps > kMaxWarps) warps = kMaxWarps;
  }
  NCCLEP_HD int bytes_of_warp() const { return record_bytes + (row_bytes > record_bytes ? row_bytes : record_bytes); }
};

// Tokens that a sending warp has stored but not yet flagged.
struct SendNotes {
  static constexpr int kRemembered = 2;
  int32_t token[kRemembered];
  uint8_t ranks[kRemembered][32];
};

template <class T>
struct Warp {
  const Session& s;
  const DispatchParams& p;
  const Record record;
  const Buffers& sizes;
  char* buffers;
  uint64_t* barrier;
  SendNotes& notes;
  int lane, worker, workers;

  __device__ char* record_buffer(uint32_t turn) const { return buffers + (turn & 1) * sizes.record_bytes; }
  __device__ char* row_buffer() const { return buffers + sizes.record_bytes; }

  // Makes the buffers of the next turn writable: the copies of two turns ago (of the last, with one buffer) have read
  // them.
  __device__ void reuse() const {
    if (lane == 0) {
      if (sizes.restore) bulk_wait_read<0>();
      else bulk_wait_read<1>();
    }
    __syncwarp();
  }

  // Stores a row in shared memory to all rows of an item: each lane holds one (-1: none). Restored if rows are to be,
  // else a record.
  __device__ void place(const char* source, int row) const {
    const int64_t bytes = sizes.restore ? p.row_bytes : p.hidden;
    fence_proxy();
    __syncwarp();
    for (int i = 0; i < p.plan.top_k; ++i) {
      const int64_t to = __shfl_sync(~0u, row, i);
      if (to < 0) break;
      if (lane == 0) bulk_store_streaming(p.rows + to * bytes, source, int(bytes));
      if (p.scales)
        for (int b = lane; b < num_blocks(p.hidden); b += 32)
          p.scales[to * num_blocks(p.hidden) + b] = reinterpret_cast<const float*>(source + record.scales)[b];
    }
    if (lane == 0) bulk_commit();
  }

  __device__ int row_of(int item) const {
    return lane < p.plan.top_k ? p.plan.item_rows[int64_t(item) * p.plan.top_k + lane] : -1;
  }
  __device__ int column_of(int item) const {
    return lane < p.plan.top_k ? p.plan.item_columns[int64_t(item) * p.plan.top_k + lane] : kNoColumn;
  }
  __device__ const char* row_of_x(int64_t token) const { return p.x + token * p.row_bytes; }

  __device__ void send() const {
    const int ranks_per_token = min(p.plan.top_k, s.op.workspace.num_ranks);
    uint32_t turn = 0, flagged = 0;
    // Flags what has arrived: all, or all but the latest.
    auto flag_until = [&](uint32_t count) {
      if (lane == 0) {
        if (count == turn) bulk_wait<0>();
        else bulk_wait<1>();
      }
      __syncwarp();
      fence_system();
      for (; flagged < count; ++flagged) {
        const uint32_t place = flagged % SendNotes::kRemembered;
        raise_flag(s, p.plan, notes.token[place], notes.ranks[place][lane]);
      }
    };
    auto ranks_of = [&](int64_t token) {
      int rank = kNoRank;
      if (token < p.plan.num_tokens && lane < ranks_per_token)
        rank = p.plan.token_ranks[token * ranks_per_token + lane];
      return rank == s.op.rank ? kNoRank : rank;
    };
    int next_rank = ranks_of(worker);
    for (int64_t token = worker; token < p.plan.num_tokens; token += workers) {
      const int rank = next_rank;
      next_rank = ranks_of(token + workers);
      if (!__any_sync(~0u, rank != kNoRank)) continue;
      if (turn - flagged == SendNotes::kRemembered) flag_until(turn - 1);
      reuse_record();
      char* buffer = record_buffer(turn);
      quantize_row<T, false>(row_of_x(token), p.hidden, p.power_of_two, buffer, record.scales);
      if (p.probs && lane < p.plan.top_k)
        reinterpret_cast<float*>(buffer + record.probs)[lane] = p.probs[token * p.plan.top_k + lane];
      if (!has_room(s, p.plan, int(token), rank, false)) {
        flag_until(turn);  // peers may need it to make room
        has_room(s, p.plan, int(token), rank, true);
      }
      fence_proxy();
      __syncwarp();
      const int64_t offset = s.op.workspace.staging_of(s.parity, s.op.rank) +
                             (token % p.plan.capacity) * record.bytes;
      for (int i = 0; i < ranks_per_token; ++i) {
        const int to = __shfl_sync(~0u, rank, int((i + token) % ranks_per_token));  // not all senders at one peer
        if (to != kNoRank && lane == 0)
          bulk_store(s.template at<char>(to, offset), buffer, p.probs ? record.bytes : record.probs);
      }
      if (lane == 0) {
        bulk_commit();
        notes.token[turn % SendNotes::kRemembered] = int(token);
      }
      notes.ranks[turn % SendNotes::kRemembered][lane] = uint8_t(rank);
      __syncwarp();
      ++turn;
    }
    flag_until(turn);
  }

  __device__ void reuse_record() const {
    if (lane == 0) bulk_wait_read<1>();
    __syncwarp();
  }

  __device__ void place_own() const {
    const int32_t* starts = p.plan.item_starts + int64_t(s.op.rank) * (p.plan.num_rounds + 1);
    const int end = starts[p.plan.num_rounds];
    int item = starts[0] + worker, next_token = 0, next_row = -1, next_column = kNoColumn;
    auto look_up = [&] {
      if (item >= end) return;
      next_token = p.plan.item_token[item];
      next_row = row_of(item);
      next_column = column_of(item);
    };
    look_up();
    for (uint32_t turn = 0; item < end; ++turn) {
      const int64_t token = next_token;
      const int row = next_row, column = next_column;
      item += workers;
      look_up();
      reuse();
      char* buffer = sizes.restore ? row_buffer() : record_buffer(turn);
      if (sizes.restore) quantize_row<T, true>(row_of_x(token), p.hidden, p.power_of_two, buffer, 0);
      else quantize_row<T, false>(row_of_x(token), p.hidden, p.power_of_two, buffer, record.scales);
      place(buffer, row);
      if (p.probs && row >= 0) p.row_probs[row] = p.probs[token * p.plan.top_k + column];
    }
    if (lane == 0) bulk_wait<0>();
  }

  __device__ void place_arrivals() const {
    Arrivals arrivals(s, p.plan, worker, workers);
    const int bytes = p.probs ? record.bytes : record.probs;
    int next_row = -1, next_column = kNoColumn;
    auto look_up = [&] {
      if (!arrivals.more) return;
      next_row = row_of(arrivals.item);
      next_column = column_of(arrivals.item);
    };
    look_up();
    for (uint32_t turn = 0; arrivals.more; ++turn) {
      const int source = arrivals.source, token = arrivals.token, row = next_row, column = next_column;
      char* buffer = sizes.restore ? buffers : record_buffer(turn);
      if (!sizes.restore) reuse();  // else the record was read by this warp alone, which is done with it
      arrivals.arrived(true);
      if (lane == 0) {
        barrier_expect(barrier, bytes);
        bulk_load(buffer, arrivals.slot(record.bytes), bytes, barrier);
      }
      arrivals.advance();
      look_up();
      barrier_wait(barrier, turn & 1);
      // With more rounds, the next one may already be on its way.
      if (p.plan.num_rounds == 1) discard(arrivals.slot_of(source, token, record.bytes), record.bytes);
      note_drained(s, p.plan, source, token);
      if (p.probs && row >= 0) p.row_probs[row] = reinterpret_cast<const float*>(buffer + record.probs)[column];
      if (sizes.restore) {
        reuse();
        dequantize_row<T>(buffer, p.hidden, record.scales, row_buffer());
      }
      place(sizes.restore ? row_buffer() : buffer, row);
    }
    if (lane == 0) bulk_wait<0>();
  }
};

template <class T>
__global__ void __launch_bounds__(32 * (kMaxWarps + 1), 1) dispatch_fp8_kernel(const __grid_constant__ DispatchParams p) {
  extern __shared__ __align__(128) char dynamic[];
  __shared__ __align__(8) uint64_t barriers[kMaxWarps];
  __shared__ SendNotes notes[kMaxWarps];
  const Session s(p.op);
  const Buffers sizes(p.hidden, p.plan.top_k, p.row_bytes, p.scales == nullptr);
  if (threadIdx.x < kMaxWarps) barrier_init(&barriers[threadIdx.x], 1);
  barrier_init_fence();
  s.announce();
  const bool sends = int(blockIdx.x) < p.send_ctas;
  if (sends) s.wait_for_credit();
  else __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, placing = gridDim.x - p.send_ctas;
  const int block = sends ? blockIdx.x : blockIdx.x - p.send_ctas;
  const int slot = warp < sizes.warps ? warp : 0;
  Warp<T> job{s, p, Record(p.hidden, p.plan.top_k), sizes, dynamic + slot * sizes.bytes_of_warp(), &barriers[slot],
              notes[slot], lane, 0, 1};
  if (warp == sizes.warps) {
    const int64_t bytes = p.scales ? p.hidden : p.row_bytes;
    if (!sends)
      zero_pads(p.plan, p.rows, bytes, p.row_probs, p.scales, num_blocks(p.hidden), block, placing);
  } else if (sends) {
    job.worker = warp * p.send_ctas + block;
    job.workers = p.send_ctas * sizes.warps;
    job.send();
  } else {
    const int own = own_warps(sizes.warps, s.op.workspace.num_ranks), others = sizes.warps - own;
    if (warp < own) {
      job.worker = warp * placing + block;
      job.workers = own * placing;
      job.place_own();
    } else {
      job.worker = (warp - own) * placing + block;
      job.workers = others * placing;
      job.place_arrivals();
    }
  }
  s.finish(p.rows, p.plan.num_rows * (p.scales ? p.hidden : p.row_bytes));
}

template <class T>
int launch(const DispatchParams& p, cudaStream_t stream) {
  const Buffers sizes(p.hidden, p.plan.top_k, p.row_bytes, p.scales == nullptr);
  if (sizes.warps < 2) return cudaErrorInvalidValue;
  const int bytes = sizes.warps * sizes.bytes_of_warp();
  cudaError_t error = cudaFuncSetAttribute(dispatch_fp8_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  dispatch_fp8_kernel<T><<<p.op.num_ctas, 32 * (sizes.warps + 1), bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace ncclep

extern "C" int ncclep_dispatch_fp8(const ncclep::DispatchParams* p, cudaStream_t stream) {
  switch (p->dtype) {
    case ncclep::kFloat32: return ncclep::launch<float>(*p, stream);
    case ncclep::kBFloat16: return ncclep::launch<__nv_bfloat16>(*p, stream);
    case ncclep::kFloat16: return ncclep::launch<__half>(*p, stream);
  }
  return cudaErrorInvalidValue;
}

// Whether a warp's buffers for rows of this size fit twice into a block.
extern "C" int ncclep_fp8_fits(int hidden, int top_k, int64_t row_bytes, int restore) {
  return ncclep::Buffers(hidden, top_k, row_bytes, restore).warps >= 2;
}
