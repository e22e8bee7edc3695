// Dispatch of rows as they are, in any dtype.
//
// About a third of the thread blocks only send: each token is loaded once and stored into the staging of every rank
// that has one of its experts, with its probs, and flagged there. The other blocks place rows: one warp those of this
// rank's own tokens, one those that arrive from peers, one the zeros. All is bulk copies through shared memory.
#include "items.cuh"

namespace ncclep {
namespace {

struct SendNotes {
  static constexpr int kRemembered = 16;
  int32_t token[kRemembered], piece[kRemembered];
  uint8_t ranks[kRemembered][kMaxTopK];
};

// Tokens with an expert elsewhere. Each lane looks after one destination.
class SendJob {
 public:
  __device__ SendJob(const Session& session, const DispatchParams& params, SendNotes& notes, int worker, int workers)
      : s(session), p(params), n(notes), pieces(params.row_bytes), lane(threadIdx.x % 32), token(worker),
        stride(workers), piece(pieces.count - 1) {
    ranks_per_token = min(p.plan.top_k, s.op.workspace.num_ranks);
    slot = slot_bytes(p.row_bytes, p.plan.top_k);
    look_ahead();
  }

  __device__ Next next(bool may_wait) {
    if (piece + 1 < pieces.count) {
      ++piece;
    } else {
      while (token < p.plan.num_tokens && !__any_sync(~0u, ahead_rank != kNoRank)) {
        token += stride;
        look_ahead();
      }
      if (token >= p.plan.num_tokens) return Next::kEnd;
      if (!has_room(s, p.plan, token, ahead_rank, may_wait)) return Next::kNotYet;
      current = token;
      rank = ahead_rank;
      prob = ahead_prob;
      piece = 0;
      token += stride;
      look_ahead();
    }
    const int place = entry++ % SendNotes::kRemembered;
    if (lane == 0) n.token[place] = current, n.piece[place] = piece;
    n.ranks[place][lane] = uint8_t(rank);
    return Next::kReady;
  }

  __device__ void load(char* stage, uint64_t* barrier) {
    const int bytes = pieces.size(piece);
    if (p.probs && piece == pieces.count - 1) {
      if (lane < p.plan.top_k) reinterpret_cast<float*>(stage + bytes)[lane] = prob;
      fence_proxy();
      __syncwarp();
    }
    if (lane == 0) {
      barrier_expect(barrier, bytes);
      bulk_load(stage, p.x + current * p.row_bytes + int64_t(piece) * pieces.bytes, bytes, barrier);
    }
  }

  __device__ void store(uint32_t entry, const char* stage) {
    if (lane != 0) return;
    const int place = entry % SendNotes::kRemembered, its_piece = n.piece[place], its_token = n.token[place];
    const int extra = p.probs && its_piece == pieces.count - 1 ? int(probs_bytes(p.plan.top_k)) : 0;
    const int64_t offset = s.op.workspace.staging_of(s.parity, s.op.rank) +
                           int64_t(its_token % p.plan.capacity) * slot + int64_t(its_piece) * pieces.bytes;
    for (int i = 0; i < ranks_per_token; ++i) {
      const int to = n.ranks[place][(i + its_token) % ranks_per_token];  // not all senders at the same peer
      if (to != kNoRank) bulk_store(s.at<char>(to, offset), stage, pieces.size(its_piece) + extra);
    }
  }

  __device__ void stored(uint32_t count, bool flush) {
    if (count - flagged < (flush ? 1 : kFlagBatch)) return;
    fence_system();
    for (; flagged < count; ++flagged) {
      const int place = flagged % SendNotes::kRemembered;
      if (n.piece[place] == pieces.count - 1) raise_flag(s, p.plan, n.token[place], n.ranks[place][lane]);
    }
  }

 private:
  static constexpr uint32_t kFlagBatch = 2;  // a fence costs more than the delay

  __device__ void look_ahead() {
    ahead_rank = kNoRank;
    if (token >= p.plan.num_tokens) return;
    if (lane < ranks_per_token) ahead_rank = p.plan.token_ranks[int64_t(token) * ranks_per_token + lane];
    if (ahead_rank == s.op.rank) ahead_rank = kNoRank;
    if (p.probs && lane < p.plan.top_k) ahead_prob = p.probs[int64_t(token) * p.plan.top_k + lane];
  }

  const Session& s;
  const DispatchParams& p;
  SendNotes& n;
  const Pieces pieces;
  const int lane;
  int token, stride, piece, ranks_per_token;
  int64_t slot, current = 0;
  int rank = kNoRank, ahead_rank = kNoRank;
  float prob = 0, ahead_prob = 0;
  uint32_t entry = 0, flagged = 0;
};

// Common to both kinds of placing: notes of an item's rows, and the stores to them.
class PlaceJob {
 public:
  __device__ PlaceJob(const Session& session, const DispatchParams& params, RowNotes& notes)
      : s(session), p(params), n(notes), pieces(params.row_bytes), lane(threadIdx.x % 32), piece(pieces.count - 1) {}

 protected:
  __device__ void look_up(int item) {
    ahead_row = -1;
    if (lane < p.plan.top_k) {
      ahead_row = p.plan.item_rows[int64_t(item) * p.plan.top_k + lane];
      ahead_column = p.plan.item_columns[int64_t(item) * p.plan.top_k + lane];
    }
  }
  __device__ int note(int source, int token) {
    const int place = entry++ % RowNotes::kRemembered;
    if (lane == 0) n.source[place] = source, n.token[place] = token, n.piece[place] = piece;
    n.rows[place][lane] = row;
    n.columns[place][lane] = uint8_t(column);
    return place;
  }
  __device__ void store_rows(int place, const char* stage) {
    if (lane != 0) return;
    const int bytes = pieces.size(n.piece[place]);
    char* target = p.rows + int64_t(n.piece[place]) * pieces.bytes;
    for (int i = 0; i < p.plan.top_k && n.rows[place][i] >= 0; ++i)
      bulk_store_streaming(target + n.rows[place][i] * p.row_bytes, stage, bytes);
  }

  const Session& s;
  const DispatchParams& p;
  RowNotes& n;
  const Pieces pieces;
  const int lane;
  int piece;
  int row = -1, column = kNoColumn, ahead_row = -1, ahead_column = kNoColumn;
  uint32_t entry = 0;
};

class ReceiveJob : public PlaceJob {
 public:
  __device__ ReceiveJob(const Session& s, const DispatchParams& p, RowNotes& notes, int worker, int workers)
      : PlaceJob(s, p, notes), arrivals(s, p.plan, worker, workers), slot(slot_bytes(p.row_bytes, p.plan.top_k)) {
    if (arrivals.more) look_up(arrivals.item);
  }
  __device__ Next next(bool may_wait) {
    if (piece + 1 < pieces.count) {
      ++piece;
    } else {
      if (!arrivals.more) return Next::kEnd;
      if (!arrivals.arrived(may_wait)) return Next::kNotYet;
      from = arrivals.slot(slot);
      source = arrivals.source;
      token = arrivals.token;
      row = ahead_row;
      column = ahead_column;
      piece = 0;
      arrivals.advance();
      if (arrivals.more) look_up(arrivals.item);
    }
    note(source, token);
    return Next::kReady;
  }
  __device__ void load(char* stage, uint64_t* barrier) {
    if (lane != 0) return;
    const int bytes = pieces.size(piece) + (carries_probs(piece) ? int(probs_bytes(p.plan.top_k)) : 0);
    barrier_expect(barrier, bytes);
    bulk_load(stage, from + int64_t(piece) * pieces.bytes, bytes, barrier);
  }
  __device__ void store(uint32_t entry, const char* stage) {
    const int place = entry % RowNotes::kRemembered;
    store_rows(place, stage);
    if (carries_probs(n.piece[place]) && n.rows[place][lane] >= 0)
      p.row_probs[n.rows[place][lane]] =
          reinterpret_cast<const float*>(stage + pieces.last_bytes)[n.columns[place][lane]];
    if (p.plan.num_rounds == 1)  // else the next round may already be on its way
      discard(arrivals.slot_of(n.source[place], n.token[place], slot) + int64_t(n.piece[place]) * pieces.bytes,
              pieces.size(n.piece[place]));
    if (n.piece[place] == pieces.count - 1) note_drained(s, p.plan, n.source[place], n.token[place]);
  }
  __device__ void stored(uint32_t, bool) {}

 private:
  __device__ bool carries_probs(int which) const { return p.probs && which == pieces.count - 1; }

  Arrivals arrivals;
  const int64_t slot;
  const char* from = nullptr;
  int source = 0, token = 0;
};

class LocalJob : public PlaceJob {
 public:
  __device__ LocalJob(const Session& s, const DispatchParams& p, RowNotes& notes, int worker, int workers)
      : PlaceJob(s, p, notes), stride(workers) {
    const int32_t* starts = p.plan.item_starts + int64_t(s.op.rank) * (p.plan.num_rounds + 1);
    item = starts[0] + worker;
    end = starts[p.plan.num_rounds];
    look_ahead();
  }
  __device__ Next next(bool) {
    if (piece + 1 < pieces.count) {
      ++piece;
    } else {
      if (item >= end) return Next::kEnd;
      token = ahead_token;
      row = ahead_row;
      column = ahead_column;
      piece = 0;
      item += stride;
      look_ahead();
    }
    const int place = note(s.op.rank, token);
    if (p.probs && row >= 0) n.probs[place][lane] = p.probs[int64_t(token) * p.plan.top_k + column];
    return Next::kReady;
  }
  __device__ void load(char* stage, uint64_t* barrier) {
    if (lane != 0) return;
    barrier_expect(barrier, pieces.size(piece));
    bulk_load(stage, p.x + token * p.row_bytes + int64_t(piece) * pieces.bytes, pieces.size(piece), barrier);
  }
  __device__ void store(uint32_t entry, const char* stage) {
    const int place = entry % RowNotes::kRemembered;
    store_rows(place, stage);
    if (p.probs && n.piece[place] == 0 && n.rows[place][lane] >= 0)
      p.row_probs[n.rows[place][lane]] = n.probs[place][lane];
  }
  __device__ void stored(uint32_t, bool) {}

 private:
  __device__ void look_ahead() {
    if (item >= end) return;
    ahead_token = p.plan.item_token[item];
    look_up(item);
  }

  int item, end, stride;
  int64_t token = 0;
  int ahead_token = 0;
};

// Dynamic shared memory: the stages of all warps, then their notes.
struct Layout {
  int stage_bytes, stages;
  NCCLEP_HD Layout(int64_t row_bytes, int top_k, int warps, int stages_of_warp) : stages(warps * stages_of_warp) {
    const int64_t piece = row_bytes < kPieceBytes ? row_bytes : kPieceBytes;
    stage_bytes = int(round_up(piece + probs_bytes(top_k), 128));
  }
  NCCLEP_HD int notes() const { return stages * stage_bytes; }
  NCCLEP_HD int bytes(int warps) const { return notes() + warps * int(sizeof(RowNotes)); }
};
static_assert(sizeof(SendNotes) <= sizeof(RowNotes), "notes of either kind share their place");

// kWarps of a block move rows, half of them either kind where the block places; one more zeroes pad rows.
template <int kWarps, int kStages>
__global__ void __launch_bounds__(32 * (kWarps + 1), 1) dispatch_kernel(const __grid_constant__ DispatchParams p) {
  static_assert(kStages / 2 + kStages + 4 <= SendNotes::kRemembered && kStages < RowNotes::kRemembered);
  extern __shared__ __align__(128) char dynamic[];
  __shared__ __align__(8) uint64_t barriers[kWarps * kStages];
  const Session s(p.op);
  const Layout layout(p.row_bytes, p.plan.top_k, kWarps, kStages);
  for (int i = threadIdx.x; i < kWarps * kStages; i += blockDim.x) barrier_init(&barriers[i], 1);
  barrier_init_fence();
  s.announce();
  const bool sends = int(blockIdx.x) < p.send_ctas;
  if (sends) s.wait_for_credit();
  else __syncthreads();

  const int warp = threadIdx.x / 32, placing = gridDim.x - p.send_ctas;
  const Ring ring{dynamic + warp * kStages * layout.stage_bytes, barriers + warp * kStages, layout.stage_bytes};
  char* notes = dynamic + layout.notes() + warp * sizeof(RowNotes);
  const int block = sends ? blockIdx.x : blockIdx.x - p.send_ctas;
  if (warp == kWarps) {
    if (!sends) zero_pads(p.plan, p.rows, p.row_bytes, p.row_probs, nullptr, 0, block, placing);
  } else if (sends) {
    SendJob job(s, p, *reinterpret_cast<SendNotes*>(notes), warp * p.send_ctas + block, kWarps * p.send_ctas);
    pump<kStages, true>(job, ring);
  } else {
    const int own = own_warps(kWarps, s.op.workspace.num_ranks);
    if (warp < own) {
      LocalJob job(s, p, *reinterpret_cast<RowNotes*>(notes), warp * placing + block, own * placing);
      pump<kStages, false>(job, ring);
    } else {
      ReceiveJob job(s, p, *reinterpret_cast<RowNotes*>(notes), (warp - own) * placing + block,
                     (kWarps - own) * placing);
      pump<kStages, false>(job, ring);
    }
  }
  s.finish(p.rows, p.plan.num_rows * p.row_bytes);
}

constexpr int kSharedBytes = 227 * 1024 - 1024;  // of a block on Hopper and Blackwell, less the static part

template <int kWarps, int kStages>
bool try_launch(const DispatchParams& p, cudaStream_t stream, cudaError_t& error) {
  const int bytes = Layout(p.row_bytes, p.plan.top_k, kWarps, kStages).bytes(kWarps);
  if (bytes > kSharedBytes) return false;
  const auto kernel = dispatch_kernel<kWarps, kStages>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return true;
  kernel<<<p.op.num_ctas, 32 * (kWarps + 1), bytes, stream>>>(p);
  error = cudaGetLastError();
  return true;
}

}  // namespace
}  // namespace ncclep

// Small rows need more of them in flight.
extern "C" int ncclep_dispatch(const ncclep::DispatchParams* p, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  if (ncclep::try_launch<8, 6>(*p, stream, error) || ncclep::try_launch<8, 3>(*p, stream, error) ||
      ncclep::try_launch<4, 3>(*p, stream, error))
    return error;
  return cudaErrorInvalidValue;
}
