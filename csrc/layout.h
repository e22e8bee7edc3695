// The communication buffer of one rank, and the numbers that address it. Compiles for host and device.
//
// Every rank of a group owns one buffer of the same layout, and every rank can write into all of them. Regions that
// peers write hold two copies, chosen by the parity of the operation's epoch, and in each copy a part for every source.
// An operation with epoch n may write once its target has announced epoch n - 1: the target then has finished
// operation n - 2, the last user of the same copy. No flag is ever reset, because epochs only grow.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define NCCLEP_HD __host__ __device__ __forceinline__
#else
#define NCCLEP_HD inline
#endif

namespace ncclep {

constexpr int kMaxRanks = 72;
constexpr int kMaxTopK = 32;
constexpr int kMaxExperts = 2048;
constexpr int kMaxCtas = 256;
constexpr int kHeaderWords = 64;      // 64-bit words that every rank publishes beside its routing
constexpr int kVectorBytes = 16;      // rows are moved in units of this
constexpr int kSegmentVectors = 1024; // at most this many vectors of a row are reduced under one flag
constexpr int kRegionAlignment = 128;
constexpr int kRoundBits = 16;

NCCLEP_HD int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
NCCLEP_HD int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// The routing is published in words of which the upper half is the epoch: whoever reads one knows whether it has
// arrived, with no flag to wait for and no fence before it. First the header, two words for each of its own, then the
// expert ids, two in a word.
constexpr int kTaggedHeaderWords = 2 * kHeaderWords;
NCCLEP_HD uint64_t make_tagged(uint64_t epoch, uint32_t value) { return epoch << 32 | value; }
NCCLEP_HD bool is_tagged(uint64_t word, uint64_t epoch) { return uint32_t(word >> 32) == uint32_t(epoch); }

// Value of a flag: grows with the epoch, and inside an operation with the round in which a slot is reused.
NCCLEP_HD uint64_t make_stamp(uint64_t epoch, uint64_t round) { return epoch << kRoundBits | round; }

// A row as it is reduced: segments of equal length (the last may be shorter).
NCCLEP_HD int num_segments(int64_t row_bytes) { return int(divide_up(row_bytes, kSegmentVectors * kVectorBytes)); }
NCCLEP_HD int segment_vectors(int64_t row_bytes) {
  return int(divide_up(row_bytes / kVectorBytes, num_segments(row_bytes)));
}

// A row and one float for each of its K pairs.
NCCLEP_HD int64_t probs_bytes(int top_k) { return round_up(4 * top_k, kVectorBytes); }
NCCLEP_HD int64_t slot_bytes(int64_t row_bytes, int top_k) { return row_bytes + probs_bytes(top_k); }

// Why a rank gave up waiting. Written into the buffers of all ranks, so that every survivor names the same cause.
struct Failure {
  uint64_t code;  // 0: none; else kFailed | kind << 40 | phase << 32 | reporter << 16 | peer
  uint64_t expected;
  uint64_t seen;
};
constexpr uint64_t kFailed = 1ull << 63;
enum FailureKind : int { kTimeout = 1, kDisagreement = 2, kTooManyTokens = 3 };
enum Phase : int {
  kWaitCredit = 1,    // a peer has not finished the operation before the last one
  kWaitRouting = 2,   // a peer has not published its routing
  kWaitGrid = 3,      // thread blocks of this rank are not all running
  kWaitRows = 4,      // a row of dispatch has not arrived
  kWaitPartials = 5,  // a partial sum of combine has not arrived
  kWaitDrain = 6,     // a peer has not emptied its staging
};

// What only this rank touches.
struct Control {
  uint64_t epoch;  // of the last finished operation
  uint32_t finished_ctas;
  uint32_t drained[kMaxRanks];
  uint32_t padding;
};

// What a block of the route kernel counts beside the pairs of each local expert.
enum Tally : int {
  kItems,         // tokens with an expert here
  kBadIds,        // expert ids that do not exist
  kOwnBadIds,     // those of this rank's own tokens
  kRemoteTokens,  // of this rank's own tokens and ranks they go to
  kRemotePairs,
  kNumTallies,
};

struct Workspace {
  int32_t num_ranks;
  int32_t num_local_experts;  // at most; columns of the counting scratch
  int64_t routing_bytes;      // of one source: 4 bytes a pair
  int64_t staging_bytes;      // of one source
  int64_t num_flags;          // of one source

  NCCLEP_HD int64_t counts_columns() const { return round_up(num_local_experts + kNumTallies, 32); }

  // Offsets in the buffer of any rank.
  NCCLEP_HD int64_t control() const { return 0; }
  NCCLEP_HD int64_t counts() const { return after(control(), sizeof(Control)); }
  NCCLEP_HD int64_t failure() const { return after(counts(), 8 * kMaxCtas * counts_columns()); }
  NCCLEP_HD int64_t arrivals() const { return after(failure(), sizeof(Failure)); }
  NCCLEP_HD int64_t credits() const { return after(arrivals(), 8 * num_ranks); }
  NCCLEP_HD int64_t headers() const { return after(credits(), 8 * num_ranks); }
  NCCLEP_HD int64_t routing() const { return after(headers(), copies(8 * kTaggedHeaderWords)); }
  NCCLEP_HD int64_t flags() const { return after(routing(), copies(routing_bytes)); }
  NCCLEP_HD int64_t staging() const { return after(flags(), copies(8 * num_flags)); }
  NCCLEP_HD int64_t total_bytes() const { return after(staging(), copies(staging_bytes)); }

  NCCLEP_HD int64_t header_of(int parity, int source) const {
    return headers() + part(parity, source) * 8 * kTaggedHeaderWords;
  }
  NCCLEP_HD int64_t routing_of(int parity, int source) const { return routing() + part(parity, source) * routing_bytes; }
  NCCLEP_HD int64_t flags_of(int parity, int source) const { return flags() + part(parity, source) * 8 * num_flags; }
  NCCLEP_HD int64_t staging_of(int parity, int source) const { return staging() + part(parity, source) * staging_bytes; }

  // Tokens of one source that fit at a time. With more, staging is reused in rounds: token t lies in slot
  // t % capacity in round t / capacity, and a round begins when the receiver has emptied the one before.
  NCCLEP_HD int64_t capacity(int64_t row_bytes, int64_t largest_slot) const {
    const int64_t by_bytes = staging_bytes / largest_slot, by_flags = num_flags / num_segments(row_bytes);
    return by_bytes < by_flags ? by_bytes : by_flags;
  }

 private:
  NCCLEP_HD int64_t after(int64_t offset, int64_t bytes) const { return round_up(offset + bytes, kRegionAlignment); }
  NCCLEP_HD int64_t copies(int64_t bytes_of_source) const { return 2 * num_ranks * bytes_of_source; }
  NCCLEP_HD int64_t part(int parity, int source) const { return int64_t(parity) * num_ranks + source; }
};

// What the route kernel tells the host, in pinned host memory.
enum RouteVerdict : int64_t { kVerdictAgreed = 0, kVerdictComplaint = 1, kVerdictGrow = 2, kVerdictFailure = 3 };
struct Report {
  uint64_t sequence;  // written last; equals the sequence number of the call
  int64_t verdict;
  int64_t max_tokens;
  int64_t needs_grad;
  int64_t remote_tokens;
  int64_t remote_pairs;
  Failure failure;
  int64_t counts[kMaxExperts];  // pairs of each local expert
};

}  // namespace ncclep
