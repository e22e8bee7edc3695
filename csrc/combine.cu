// Combine: sums the rows of every token, in fixed order.
//
// Each rank adds a token's rows in float32 in ascending row (hence expert), rounds the sum once and writes it into the
// staging of the token's rank; that rank adds the partial sums in float32 in ascending rank, its own among them. A flag
// for each token and segment of a row connects the two, so that the second sum follows the first while later ones are
// still under way.
//
// Teams of warps do either in every thread block. A team's first warp finds the rows and brings them into shared memory
// by bulk copies, several ahead; it leaves a note with each that says what to do with it. The other warps each own a
// part of the segment, and do what the notes say.
#include "numbers.cuh"
#include "schedule.h"
#include "sync.cuh"

namespace ncclep {
namespace {

constexpr int kStages = 6;
constexpr int kSummingWarps = 8;  // for peers in a block; as many for the final sums
constexpr int kLaneVectors = 4;   // of a segment, in the registers of a lane
constexpr int kFlagBatch = 4;     // units whose flags a warp may put off: a fence costs more than the delay
constexpr int kUnits = 16;        // more than a team's warps can be apart
static_assert(kUnits > kStages + kFlagBatch);

enum Action : uint32_t {
  kAddOwnFirst = 1,  // add what kRound set aside
  kAdd = 2,          // add what lies in the stage
  kRound = 4,        // round the sum and set it aside; begin anew
  kAddOwnLast = 8,
  kWrite = 16,       // the sum is complete
  kEnd = 32,
};

struct Note {
  uint32_t actions;
  int32_t vectors;  // of the segment
  int32_t token;
  char* target;     // of the sum
  uint64_t* flag;   // to raise behind it, or null
  uint64_t stamp;
};

// Shared memory of a team.
struct Team {
  char* stages;
  int stage_bytes;
  uint64_t *full, *empty;  // [kStages] each
  Note* notes;             // [kStages]
  uint32_t* written;       // [kUnits] warps that have written each unit
};

// Common to the loading warps: where segments lie, and handing them over.
class Loader {
 public:
  __device__ Loader(const Session& session, const CombineParams& params, const Team& team)
      : s(session), p(params), team(team), lane(threadIdx.x % 32), segments(num_segments(params.row_bytes)),
        length(segment_vectors(params.row_bytes)), slot(slot_bytes(params.row_bytes, params.plan.top_k)) {}

 protected:
  // Hands over the segment `index` of `row` (null: nothing) with a note of what to do with it. `staged`: nobody needs
  // what was there once it has been read.
  __device__ void pass(const char* row, int index, const Note& note, bool staged = false) {
    const int stage = count % kStages;
    barrier_wait(&team.empty[stage], (count / kStages & 1) ^ 1);
    __syncwarp();  // what the other lanes have done is handed over too
    const uint64_t read = __shfl_sync(~0u, spent, stage);
    if (read) discard(s.mine + read / kSpentVectors * kVectorBytes, read % kSpentVectors * kVectorBytes);
    if (lane == stage)
      spent = staged ? (row + offset(index) - s.mine) / kVectorBytes * kSpentVectors + vectors(index) : 0;
    if (lane == 0) {
      team.notes[stage] = note;
      const int bytes = row ? vectors(index) * kVectorBytes : 0;
      barrier_expect(&team.full[stage], bytes);
      if (row) bulk_load_streaming(team.stages + stage * team.stage_bytes, row + offset(index), bytes, &team.full[stage]);
    }
    __syncwarp();
    ++count;
  }
  __device__ void end() { pass(nullptr, 0, {kEnd}); }

  __device__ int64_t offset(int index) const { return int64_t(index) * length * kVectorBytes; }
  __device__ int vectors(int index) const { return min(length, int(p.row_bytes / kVectorBytes) - index * length); }
  __device__ int row_of(int item) const {
    return lane < p.plan.top_k ? p.plan.item_rows[int64_t(item) * p.plan.top_k + lane] : -1;
  }
  __device__ int column_of(int item) const {
    return lane < p.plan.top_k ? p.plan.item_columns[int64_t(item) * p.plan.top_k + lane] : kNoColumn;
  }

  const Session& s;
  const CombineParams& p;
  const Team& team;
  const int lane, segments, length;
  const int64_t slot;
  uint32_t count = 0;
  static constexpr uint64_t kSpentVectors = 2 * kSegmentVectors;
  uint64_t spent = 0;  // what stage `lane` holds of staging: vectors before it, times kSpentVectors, plus its own
};

// Loads this rank's rows of peers' tokens.
class PeerLoader : public Loader {
 public:
  __device__ PeerLoader(const Session& s, const CombineParams& p, const Team& team, int worker, int workers)
      : Loader(s, p, team),
        walk{p.plan.item_starts, uint32_t(s.op.workspace.num_ranks), uint32_t(p.plan.num_rounds), uint32_t(s.op.rank),
             uint32_t(worker), uint32_t(workers), uint32_t(num_segments(p.row_bytes))} {}

  __device__ void run() {
    const Workspace& w = s.op.workspace;
    look_ahead();
    while (more) {
      const int to = home, its_token = token, its_index = index, row = ahead_row, column = ahead_column;
      look_ahead();
      const int round = its_token / p.plan.capacity, place = its_token - round * p.plan.capacity;
      const uint64_t stamp = make_stamp(s.epoch, round);
      if (round > 0) {
        if (lane == 0) s.wait(s.here<uint64_t>(w.credits()) + to, stamp, to, kWaitDrain);
        __syncwarp();
      }
      char* staging = s.at<char>(to, w.staging_of(s.parity, s.op.rank)) + place * slot;
      const bool sends_prob = p.row_probs && its_index == 0 && column != kNoColumn;
      const float prob = sends_prob && row >= 0 ? p.row_probs[row] : 0;
      // Before the last segment is handed over, and so before its flag.
      auto send_prob = [&] {
        if (sends_prob) reinterpret_cast<float*>(staging + p.row_bytes)[column] = prob;
      };
      Note note{0, vectors(its_index), its_token, staging + offset(its_index)};
      note.flag = s.at<uint64_t>(to, w.flags_of(s.parity, s.op.rank)) + int64_t(place) * segments + its_index;
      note.stamp = stamp;
      const int rows = __popc(__ballot_sync(~0u, row >= 0));
      for (int i = 0; i < rows; ++i) {
        note.actions = i + 1 < rows ? kAdd : kAdd | kWrite;
        if (i + 1 == rows) send_prob();
        pass(p.rows + __shfl_sync(~0u, row, i) * p.row_bytes, its_index, note);
      }
      if (rows == 0) {  // all were dropped: the sum is zero
        send_prob();
        note.actions = kWrite;
        pass(nullptr, its_index, note);
      }
    }
    end();
  }

 private:
  __device__ void look_ahead() {
    more = walk.next(home, item, index);
    if (!more) return;
    token = p.plan.item_token[item];
    ahead_row = row_of(item);
    if (p.row_probs) ahead_column = column_of(item);
  }

  ItemWalk walk;
  bool more;
  int home, item, index, token = 0, ahead_row = -1, ahead_column = kNoColumn;
};

// Loads what this rank's tokens have here and at peers.
class HomeLoader : public Loader {
 public:
  using Loader::Loader;

  __device__ void run(int worker, int workers) {
    const Workspace& w = s.op.workspace;
    const int me = s.op.rank, ranks_per_token = min(p.plan.top_k, w.num_ranks);
    const int64_t units = int64_t(p.plan.num_tokens) * segments;
    int ahead_item = -1, ahead_rank = kNoRank, ahead_pair_rank = kNoRank;
    auto look_ahead = [&](int64_t unit) {
      if (unit >= units) return;
      const int64_t token = unit / segments;
      ahead_item = p.plan.token_item[token];
      ahead_rank = lane < ranks_per_token ? p.plan.token_ranks[token * ranks_per_token + lane] : kNoRank;
      if (p.row_probs && lane < p.plan.top_k) ahead_pair_rank = p.plan.pair_ranks[token * p.plan.top_k + lane];
    };
    look_ahead(worker);
    for (int64_t unit = worker; unit < units; unit += workers) {
      const int token = int(unit / segments), index = int(unit % segments), item = ahead_item, rank = ahead_rank;
      const int pair_rank = ahead_pair_rank, row = item >= 0 ? row_of(item) : -1;
      const bool probs = p.row_probs && index == 0 && lane < p.plan.top_k;
      const int column = probs && item >= 0 ? column_of(item) : kNoColumn;
      look_ahead(unit + workers);

      const int round = token / p.plan.capacity, place = token - round * p.plan.capacity;
      if (round > 0) {  // counted as drained by round: none of this one before all of the last
        if (lane == 0) s.wait(s.here<uint64_t>(w.credits()) + me, make_stamp(s.epoch, round), me, kWaitDrain);
        __syncwarp();
      }
      const int rows = __popc(__ballot_sync(~0u, row >= 0));
      const int before = __popc(__ballot_sync(~0u, rank < me));
      const int partials = before + __popc(__ballot_sync(~0u, rank > me && rank != kNoRank));
      const float prob = column != kNoColumn && row >= 0 ? p.row_probs[row] : 0;
      Note note{0, vectors(index), token, p.y + token * p.row_bytes + offset(index), nullptr, 0};
      for (int i = 0; i < rows; ++i) {
        note.actions = i + 1 < rows ? kAdd : kAdd | kRound;
        if (i + 1 == rows && partials == 0) note.actions |= kAddOwnLast | kWrite;
        pass(p.rows + __shfl_sync(~0u, row, i) * p.row_bytes, index, note);
      }
      float* pairs = probs ? p.pair_probs + int64_t(token) * p.plan.top_k : nullptr;
      if (column != kNoColumn) pairs[column] = prob;
      if (probs && pair_rank == kNoRank) pairs[lane] = 0;
      for (int i = 0; i < partials; ++i) {
        const int from = __shfl_sync(~0u, rank, i < before || item < 0 ? i : i + 1);  // over this rank itself
        if (lane == 0) {
          const uint64_t* flag = s.here<uint64_t>(w.flags_of(s.parity, from)) + int64_t(place) * segments + index;
          s.wait(flag, make_stamp(s.epoch, round), from, kWaitPartials);
          fence_proxy();
        }
        __syncwarp();
        const char* staged = s.here<char>(w.staging_of(s.parity, from)) + place * slot;
        if (probs && pair_rank == from) pairs[lane] = reinterpret_cast<const float*>(staged + p.row_bytes)[lane];
        note.actions = kAdd;
        if (i == before && rows > 0) note.actions |= kAddOwnFirst;
        if (i + 1 == partials) note.actions |= before == partials && rows > 0 ? kAddOwnLast | kWrite : kWrite;
        pass(staged, index, note, p.plan.num_rounds == 1);
      }
      note.actions = kWrite;
      if (rows + partials == 0) pass(nullptr, index, note);
    }
    end();
  }
};

// The warps that sum: warp `part` of `parts` owns that part of every segment.
template <class T>
class Summer {
 public:
  __device__ Summer(const Session& session, const CombineParams& params, const Team& team, int part, int parts)
      : s(session), p(params), team(team), lane(threadIdx.x % 32), part(part), parts(parts) {
    const int share = int(divide_up(segment_vectors(p.row_bytes), parts));
    first = part * share + lane;
    end = part * share + share;
  }

  __device__ void run() {
    clear();
    for (uint32_t count = 0;; ++count) {
      const int stage = count % kStages;
      if (pending > 0 && !barrier_reached(&team.full[stage], count / kStages & 1)) raise_flags();
      barrier_wait(&team.full[stage], count / kStages & 1);
      const Note& note = team.notes[stage];
      const uint32_t actions = note.actions;
      if (actions & kEnd) break;
      if (actions & kAddOwnFirst) add_own();
      if (actions & kAdd) add(team.stages + stage * team.stage_bytes, min(end, note.vectors));
      if (actions & kRound) {
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i) own[i] = pack(sum[i], T());
        clear();
      }
      if (actions & kAddOwnLast) add_own();
      if (actions & kWrite) write(note);
      __syncwarp();
      if (lane == 0) barrier_arrive(&team.empty[stage]);
    }
    raise_flags();
  }

 private:
  static constexpr int kSize = Vector<T>::kSize;

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i)
#pragma unroll
      for (int j = 0; j < kSize; ++j) sum[i][j] = 0;
  }
  __device__ void add(int i, const uint4& data) {
    float values[kSize];
    unpack(data, values, T());
#pragma unroll
    for (int j = 0; j < kSize; ++j) sum[i][j] = __fadd_rn(sum[i][j], values[j]);
  }
  __device__ void add_own() {
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) add(i, own[i]);
  }
  __device__ void add(const char* segment, int limit) {
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i)
      if (first + 32 * i < limit) add(i, reinterpret_cast<const uint4*>(segment)[first + 32 * i]);
  }

  __device__ void write(const Note& note) {
    const int limit = min(end, note.vectors);
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i)
      if (first + 32 * i < limit) {
        uint4* target = reinterpret_cast<uint4*>(note.target) + first + 32 * i;
        if (note.flag) *target = pack(sum[i], T());
        else __stcs(target, pack(sum[i], T()));
      }
    clear();
    if (note.flag) {
      if (lane == pending) flag = note.flag, stamp = note.stamp;
      if (++pending == kFlagBatch) raise_flags();
    } else if (part == 0) {
      note_drained(note.token);
    }
  }

  // Makes what this warp has written visible. For each unit, the last of the team's warps to do so raises the flag.
  __device__ void raise_flags() {
    if (pending == 0) return;
    __syncwarp();
    fence_system();
    if (lane < pending) {
      uint32_t* written = &team.written[(unit + lane) % kUnits];
      if (atomicAdd(written, 1u) == uint32_t(parts - 1)) {
        *written = 0;
        fence_system();
        store_relaxed(flag, stamp);
      }
    }
    unit += pending;
    pending = 0;
  }

  // The last unit of a round lets the peers fill staging again, and then, for it to be the only one to grant, this rank
  // begin the next round.
  __device__ void note_drained(int token) {
    if (p.plan.num_rounds == 1) return;
    __syncwarp();
    if (lane != 0) return;
    const int round = token / p.plan.capacity;
    __threadfence();
    const uint32_t drained = atomicAdd(&s.control()->drained[0], 1u) + 1;
    if (drained != uint32_t(round + 1) * p.plan.capacity * num_segments(p.row_bytes)) return;
    const int num_ranks = s.op.workspace.num_ranks;
    for (int step = 1; step <= num_ranks; ++step)
      store_release(s.at<uint64_t>((s.op.rank + step) % num_ranks, s.op.workspace.credits()) + s.op.rank,
                    make_stamp(s.epoch, round + 1));
  }

  const Session& s;
  const CombineParams& p;
  const Team& team;
  const int lane, part, parts;
  int first, end;
  uint32_t unit = 0;  // the first whose flag is pending
  int pending = 0;
  uint64_t* flag = nullptr;  // of pending unit `lane`
  uint64_t stamp = 0;
  float sum[kLaneVectors][kSize];
  uint4 own[kLaneVectors];
};

NCCLEP_HD int stage_bytes_of(int64_t row_bytes) {
  return int(round_up(segment_vectors(row_bytes) * kVectorBytes, 128));
}

// Teams of kParts summing warps: as many as a segment keeps busy.
template <class T, int kParts>
__global__ void __launch_bounds__(2 * 32 * (kSummingWarps / kParts) * (kParts + 1), 1)
    combine_kernel(const __grid_constant__ CombineParams p) {
  constexpr int kTeams = kSummingWarps / kParts;  // of either kind
  extern __shared__ __align__(128) char dynamic[];
  __shared__ __align__(8) uint64_t full[2 * kTeams][kStages], empty[2 * kTeams][kStages];
  __shared__ Note notes[2 * kTeams][kStages];
  __shared__ uint32_t written[2 * kTeams][kUnits];
  const Session s(p.op);
  for (int i = threadIdx.x; i < 2 * kTeams * kStages; i += blockDim.x) {
    barrier_init(&full[0][0] + i, 1);
    barrier_init(&empty[0][0] + i, kParts);
  }
  for (int i = threadIdx.x; i < 2 * kTeams * kUnits; i += blockDim.x) (&written[0][0])[i] = 0;
  barrier_init_fence();
  s.announce();
  s.wait_for_credit();

  const int warp = threadIdx.x / 32, t = warp / (kParts + 1), part = warp % (kParts + 1) - 1;
  const int bytes = stage_bytes_of(p.row_bytes);
  const Team team{dynamic + t * kStages * bytes, bytes, full[t], empty[t], notes[t], written[t]};
  // Neighbouring units in different blocks.
  const int worker = t % kTeams * gridDim.x + blockIdx.x, workers = kTeams * gridDim.x;
  if (part >= 0) Summer<T>(s, p, team, part, kParts).run();
  else if (t < kTeams) PeerLoader(s, p, team, worker, workers).run();
  else HomeLoader(s, p, team).run(worker, workers);
  s.finish(p.y, p.plan.num_tokens * p.row_bytes);
}

template <class T, int kParts>
int launch_with(const CombineParams& p, cudaStream_t stream) {
  constexpr int kTeams = kSummingWarps / kParts;
  const int bytes = 2 * kTeams * kStages * stage_bytes_of(p.row_bytes);
  const auto kernel = combine_kernel<T, kParts>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kernel<<<p.op.num_ctas, 2 * 32 * kTeams * (kParts + 1), bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class T>
int launch(const CombineParams& p, cudaStream_t stream) {
  const int vectors = segment_vectors(p.row_bytes);
  if (vectors <= 2 * 32 * kLaneVectors) return launch_with<T, 2>(p, stream);
  if (vectors <= 4 * 32 * kLaneVectors) return launch_with<T, 4>(p, stream);
  return launch_with<T, 8>(p, stream);
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
