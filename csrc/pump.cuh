// A warp that moves rows: bulk load into shared memory, bulk stores to wherever they belong, several in flight.
#pragma once
#include "layout.h"
#include "memory.cuh"

namespace ncclep {

// Shared memory of one pumping warp.
struct Ring {
  char* stages;        // [kStages, stage_bytes]
  uint64_t* barriers;  // [kStages]
  int stage_bytes;
};

enum class Next { kEnd, kNotYet, kReady };

// Moves all entries of `job`. Called by a whole warp. The job has
//   Next next(bool may_wait)    the next entry, if its source is readable; with may_wait it waits for it
//   void load(stage, barrier)   lane 0 starts the load of that entry
//   void store(entry, stage)    starts its stores, in the bulk group of lane 0
//   void stored(count, flush)  the first `count` entries have reached their targets (only if kReport); with flush it
//                              must not put off telling them
// A not yet readable entry never holds up those before it, and stored() is up to date before next() may wait: peers
// that wait for our rows, or for our reading theirs, are served first.
template <int kStages, bool kReport, class Job>
__device__ void pump(Job& job, const Ring& ring) {
  constexpr int kStoring = kStages / 2, kLoading = kStages - kStoring;
  const bool leader = threadIdx.x % 32 == 0;
  uint32_t loaded = 0, done = 0;
  bool end = false;
  for (;;) {
    while (!end && loaded - done < kLoading) {
      const bool idle = loaded == done;
      Next next = job.next(false);
      if (next == Next::kNotYet) {
        if (!idle) break;
        if (kReport) {
          if (leader) bulk_wait<0>();
          __syncwarp();
          job.stored(done, true);
        }
        next = job.next(true);
      }
      if (next == Next::kEnd) {
        end = true;
        break;
      }
      const int stage = loaded % kStages;
      job.load(ring.stages + stage * ring.stage_bytes, ring.barriers + stage);
      ++loaded;
    }
    if (loaded == done) break;
    const int stage = done % kStages;
    barrier_wait(ring.barriers + stage, done / kStages & 1);
    __syncwarp();
    job.store(done, ring.stages + stage * ring.stage_bytes);
    if (leader) {
      bulk_commit();
      if (kReport) bulk_wait<kStoring>();
      else bulk_wait_read<kStoring>();
    }
    __syncwarp();
    ++done;
    if (kReport && done > kStoring) job.stored(done - kStoring, false);
  }
  if (leader) bulk_wait<0>();
  __syncwarp();
  if (kReport) job.stored(done, true);
}

// Largest piece of a row that one entry moves.
constexpr int kPieceBytes = 16384;

// A row in pieces of equal size (the last may be shorter); probs travel with the last.
struct Pieces {
  int count, bytes, last_bytes;
  NCCLEP_HD explicit Pieces(int64_t row_bytes) {
    count = int(divide_up(row_bytes, kPieceBytes));
    bytes = int(round_up(divide_up(row_bytes, count), kVectorBytes));
    last_bytes = int(row_bytes - int64_t(count - 1) * bytes);
  }
  NCCLEP_HD int size(int piece) const { return piece == count - 1 ? last_bytes : bytes; }
};

}  // namespace ncclep
