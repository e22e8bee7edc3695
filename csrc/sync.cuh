// What every kernel begins and ends with, and how it waits.
#pragma once
#include "memory.cuh"
#include "params.h"

namespace ncclep {

// One operation on one rank: addresses, epoch, waiting, failing.
struct Session {
  const Operation& op;
  char* mine;
  uint64_t epoch;
  int parity;

  __device__ explicit Session(const Operation& operation) : op(operation) {
    mine = buffer(op.rank);
    epoch = *reinterpret_cast<volatile uint64_t*>(&control()->epoch) + 1;
    parity = int(epoch & 1);
  }

  __device__ char* buffer(int rank) const { return reinterpret_cast<char*>(op.peers[rank]); }
  template <class T>
  __device__ T* at(int rank, int64_t offset) const {
    return reinterpret_cast<T*>(buffer(rank) + offset);
  }
  template <class T>
  __device__ T* here(int64_t offset) const {
    return reinterpret_cast<T*>(mine + offset);
  }
  __device__ Control* control() const { return here<Control>(op.workspace.control()); }
  __device__ Failure* failure() const { return here<Failure>(op.workspace.failure()); }
  __device__ bool failed() const { return load_relaxed(&failure()->code) != 0; }

  // Tells all peers that every operation before this one is finished here. Once per kernel.
  __device__ void announce() const {
    if (blockIdx.x != 0) return;
    for (int peer = threadIdx.x; peer < op.workspace.num_ranks; peer += blockDim.x)
      store_release(at<uint64_t>(peer, op.workspace.arrivals()) + op.rank, epoch);
  }

  // Waits until all peers have finished the operation before the last one: what it used may be written again. The
  // whole block calls it.
  __device__ void wait_for_credit() const {
    for (int peer = threadIdx.x; peer < op.workspace.num_ranks; peer += blockDim.x)
      wait(here<uint64_t>(op.workspace.arrivals()) + peer, epoch - 1, peer, kWaitCredit);
    __syncthreads();
  }

  // Waits until `flag` is at least `expected`. After a failure anywhere it returns at once: the operation then ends
  // with undefined output, which finish() overwrites, and the host raises.
  __device__ void wait(const uint64_t* flag, uint64_t expected, int peer, Phase phase) const {
    if (load_acquire(flag) < expected) wait_long(flag, expected, peer, phase);
  }

  __device__ void fail(FailureKind kind, int phase, int peer, uint64_t expected, uint64_t seen) const {
    const uint64_t code = kFailed | uint64_t(kind) << 40 | uint64_t(phase) << 32 | uint64_t(op.rank) << 16 | peer;
    auto* code_here = reinterpret_cast<unsigned long long*>(&failure()->code);
    if (atomicCAS(code_here, 0ull, code) != 0) return;  // the first cause counts
    store_relaxed(&op.report->failure.expected, expected);
    store_relaxed(&op.report->failure.seen, seen);
    store_release(&op.report->failure.code, code);
    if (kind != kTimeout) return;  // everybody sees the others by itself
    for (int rank = 0; rank < op.workspace.num_ranks; ++rank) {
      if (rank == op.rank || rank == peer) continue;  // the peer may be gone, and its memory with it
      Failure* there = at<Failure>(rank, op.workspace.failure());
      store_relaxed(&there->expected, expected);
      store_relaxed(&there->seen, seen);
      store_release(&there->code, code);
    }
  }

  // What the tagged word `word` of `peer` holds, once it is this operation's; `seen` is what it held just now. Of this
  // rank: of another block of this kernel. Blocks wait for what they need of each other, and for no barrier; they are
  // few enough to run together. 0 after a failure.
  __device__ uint32_t wait_tagged(const uint64_t* word, uint64_t seen, int peer, Phase phase) const {
    return is_tagged(seen, epoch) ? uint32_t(seen) : wait_tagged_long(word, peer, phase);
  }
  __device__ uint64_t tagged(uint32_t value) const { return make_tagged(epoch, value); }

  // Last call of every block. After a failure the last one fills `output` [bytes] with nan, so that nobody takes it for
  // a result.
  __device__ void finish(char* output = nullptr, int64_t bytes = 0) const {
    __shared__ bool last;
    Control* c = control();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&c->finished_ctas, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    if (failed()) {
      for (int64_t i = threadIdx.x; i < bytes / kVectorBytes; i += blockDim.x)
        reinterpret_cast<uint4*>(output)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
      if (threadIdx.x == 0) hand_on_failure();
    }
    for (int i = threadIdx.x; i < kMaxRanks; i += blockDim.x) c->drained[i] = 0;
    if (threadIdx.x != 0) return;
    c->finished_ctas = 0;
    c->epoch = epoch;  // the next kernel in the stream sees all this
  }

 private:
  __device__ __noinline__ void wait_long(const uint64_t* flag, uint64_t expected, int peer, Phase phase) const {
    const uint64_t start = global_time_ns();
    // Other warps of this rank wait for a peer: they know whom.
    const uint64_t limit = peer == op.rank ? 2 * op.timeout_ns : op.timeout_ns;
    for (;;) {
      for (int i = 0; i < 64; ++i)
        if (load_acquire(flag) >= expected) return;
      if (failed()) {
        hand_on_failure();
        return;
      }
      if (global_time_ns() - start > limit) {
        fail(kTimeout, phase, peer, expected, load_acquire(flag));
        return;
      }
    }
  }

  __device__ __noinline__ uint32_t wait_tagged_long(const uint64_t* word, int peer, Phase phase) const {
    const uint64_t start = global_time_ns();
    // Other blocks of this rank wait for a peer: they know whom.
    const uint64_t limit = phase == kWaitGrid ? 2 * op.timeout_ns : op.timeout_ns;
    for (;;) {
      for (int i = 0; i < 64; ++i) {
        const uint64_t seen = load_relaxed(word);
        if (is_tagged(seen, epoch)) return uint32_t(seen);
      }
      if (failed()) {
        hand_on_failure();
        return 0;
      }
      if (global_time_ns() - start > limit) {
        fail(kTimeout, phase, peer, epoch, load_relaxed(word) >> 32);
        return 0;
      }
    }
  }

  // A peer's report of a failure reaches this rank's host.
  __device__ void hand_on_failure() const {
    if (load_relaxed(&op.report->failure.code) != 0) return;
    const Failure* f = failure();
    store_relaxed(&op.report->failure.expected, load_relaxed(&f->expected));
    store_relaxed(&op.report->failure.seen, load_relaxed(&f->seen));
    store_release(&op.report->failure.code, load_relaxed(&f->code));
  }
};

}  // namespace ncclep
