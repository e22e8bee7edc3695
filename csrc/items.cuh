// What the warps of dispatch share: the entries of their work, and pad rows.
#pragma once
#include "pump.cuh"
#include "schedule.h"
#include "sync.cuh"

namespace ncclep {

// How many of a placing block's warps look after this rank's own tokens; the others after those of peers.
NCCLEP_HD int own_warps(int warps, int num_ranks) { return warps / num_ranks > 1 ? warps / num_ranks : 1; }

// Rows of the entries under way in a warp: entry e in place e % kRemembered. In shared memory.
struct RowNotes {
  static constexpr int kRemembered = 8;
  int32_t rows[kRemembered][kMaxTopK];
  uint8_t columns[kRemembered][kMaxTopK];
  float probs[kRemembered][kMaxTopK];
  int32_t source[kRemembered], token[kRemembered], piece[kRemembered];
};

// First round from `round` on in which `source` has an item here.
__device__ __forceinline__ int next_round_with_items(const Plan& plan, int source, int round) {
  const int32_t* starts = plan.item_starts + int64_t(source) * (plan.num_rounds + 1);
  while (round < plan.num_rounds && starts[round] == starts[round + 1]) ++round;
  return round;
}

// Lets `source` fill the staging of `round`, and of those before.
__device__ __forceinline__ void grant_round(const Session& s, int source, int round) {
  store_release(s.at<uint64_t>(source, s.op.workspace.credits()) + s.op.rank, make_stamp(s.epoch, round));
}

// Called by a whole warp when it has read a row of a peer out of staging: the last of a round lets the peer go on.
__device__ __forceinline__ void note_drained(const Session& s, const Plan& plan, int source, int token) {
  if (plan.num_rounds == 1 || threadIdx.x % 32 != 0) return;
  const int round = token / plan.capacity;
  const int32_t* starts = plan.item_starts + int64_t(source) * (plan.num_rounds + 1);
  __threadfence();
  const uint32_t drained = atomicAdd(&s.control()->drained[source], 1u) + 1;
  if (drained == uint32_t(starts[round + 1] - starts[0]))
    grant_round(s, source, next_round_with_items(plan, source, round + 1));
}

// Zeroes what holds no token: the ends of the zones, and all rows behind the last one. `worker` is a warp. FP8 rows
// get scale 1, as quantising zeros would give.
__device__ __forceinline__ void zero_pads(const Plan& plan, char* rows, int64_t row_bytes, float* row_probs,
                                          float* scales, int num_scales, int worker, int num_workers) {
  const int lane = threadIdx.x % 32;
  auto zero = [&](int64_t row) {
    uint4* target = reinterpret_cast<uint4*>(rows + row * row_bytes);
    for (int v = lane; v < row_bytes / kVectorBytes; v += 32) target[v] = make_uint4(0, 0, 0, 0);
    if (row_probs && lane == 0) row_probs[row] = 0;
    for (int i = lane; scales && i < num_scales; i += 32) scales[row * num_scales + i] = 1;
  };
  int64_t used = 0;
  for (int base = 0; base < plan.num_local_experts; base += 32) {
    const int e = base + lane;
    const bool exists = e < plan.num_local_experts;
    const int64_t start = exists ? plan.zone_starts[e] : 0, size = exists ? plan.zone_sizes[e] : 0;
    const int64_t valid = exists ? plan.zone_valid[e] : 0;
    for (uint32_t padded = __ballot_sync(~0u, valid < size); padded; padded &= padded - 1) {
      const int from = __ffs(padded) - 1;
      const int64_t first = __shfl_sync(~0u, start, from), end = first + __shfl_sync(~0u, size, from);
      for (int64_t row = first + __shfl_sync(~0u, valid, from) + worker; row < end; row += num_workers) zero(row);
    }
    used = max(used, start + size);
  }
  for (int d = 16; d; d >>= 1) used = max(used, __shfl_xor_sync(~0u, used, d));
  for (int64_t row = used + worker; row < plan.num_rows; row += num_workers) zero(row);
}

// The items that a warp receives, one after the other, with the next one's place already being read.
struct Arrivals {
  const Session& s;
  const Plan& plan;
  ItemWalk walk;
  int lane;
  bool more;
  int source, item, token;

  __device__ Arrivals(const Session& session, const Plan& p, int worker, int num_workers)
      : s(session), plan(p), lane(threadIdx.x % 32) {
    walk = {p.item_starts, uint32_t(session.op.workspace.num_ranks), uint32_t(p.num_rounds), uint32_t(session.op.rank),
            uint32_t(worker), uint32_t(num_workers), 1};
    if (worker == 0 && p.num_rounds > 1) {  // nobody drains rounds without items
      for (int from = lane; from < session.op.workspace.num_ranks; from += 32) {
        const int round = next_round_with_items(p, from, 0);
        if (round > 0 && from != session.op.rank) grant_round(session, from, round);
      }
    }
    advance();
  }
  __device__ void advance() {
    int unit;
    more = walk.next(source, item, unit);
    if (more) token = plan.item_token[item];
  }
  __device__ uint64_t stamp() const { return make_stamp(s.epoch, token / plan.capacity); }
  // Whether the row of the current item has arrived. Lane 0 acquires it.
  __device__ bool arrived(bool may_wait) const {
    const uint64_t* flag = s.here<uint64_t>(s.op.workspace.flags_of(s.parity, source)) + token % plan.capacity;
    int ready = 0;
    if (lane == 0) {
      ready = load_acquire(flag) >= stamp();
      if (!ready && may_wait) {
        s.wait(flag, stamp(), source, kWaitRows);
        ready = 1;
      }
      if (ready) fence_proxy();
    }
    return __shfl_sync(~0u, ready, 0);
  }
  __device__ const char* slot(int64_t bytes) const { return slot_of(source, token, bytes); }
  __device__ const char* slot_of(int from, int which, int64_t bytes) const {
    return s.here<char>(s.op.workspace.staging_of(s.parity, from)) + int64_t(which % plan.capacity) * bytes;
  }
};

// Whether all peers that token `token` goes to have room for it. `rank` of each lane, kNoRank for none.
__device__ __forceinline__ bool has_room(const Session& s, const Plan& plan, int token, int rank, bool may_wait) {
  const int round = token / plan.capacity;
  if (round == 0) return true;
  const uint64_t* credit = s.here<uint64_t>(s.op.workspace.credits()) + rank;
  const uint64_t stamp = make_stamp(s.epoch, round);
  bool room = rank == kNoRank || load_acquire(credit) >= stamp;
  if (!room && may_wait) {
    s.wait(credit, stamp, rank, kWaitDrain);
    room = true;
  }
  return __all_sync(~0u, room);
}

// Raises the flag of token `token` at the ranks of each lane (kNoRank for none), behind everything stored before.
__device__ __forceinline__ void raise_flag(const Session& s, const Plan& plan, int token, int rank) {
  if (rank == kNoRank) return;
  uint64_t* flags = s.at<uint64_t>(rank, s.op.workspace.flags_of(s.parity, s.op.rank));
  store_relaxed(flags + token % plan.capacity, make_stamp(s.epoch, token / plan.capacity));
}

}  // namespace ncclep
