// Who moves which row, when. Compiles for host and device.
#pragma once
#include "layout.h"

namespace ncclep {

// Tokens [begin, end) of a worker when `total` tokens are cut evenly into `workers` contiguous pieces.
struct Span {
  int begin, end;
};
NCCLEP_HD Span even_span(int64_t total, int worker, int workers) {
  return {int(total * worker / workers), int(total * (worker + 1) / workers)};
}

// Visits this worker's share of the items of all sources but `skip`, one of each source in turn, so that rows are
// placed in the order in which they arrive from all peers at once. Rounds come one after the other: an item of round r
// never waits behind one of round r + 1, which is why bounded staging cannot deadlock.
//
// `starts` [R, num_rounds + 1]: first item of each source and round. Sources are visited from `skip` + 1 on, and each
// source's remainder goes to other workers.
struct ItemWalk {
  const int32_t* starts;
  uint32_t num_ranks, num_rounds, skip, worker, num_workers, units;  // units: pieces of an item, each with a worker
  uint32_t round = 0, turn = 0, step = 1;
  bool found = false;

  // Next unit: item `item`, piece `unit` of it, of source `source`. False at the end.
  NCCLEP_HD bool next(int& source, int& item, int& unit) {
    while (round < num_rounds) {
      for (; step < num_ranks; ++step) {
        const uint32_t candidate = skip + step < num_ranks ? skip + step : skip + step - num_ranks;
        const int32_t* bounds = starts + int64_t(candidate) * (num_rounds + 1) + round;
        const uint32_t index = turn * num_workers + (worker + candidate * spread()) % num_workers;
        if (index >= uint32_t(bounds[1] - bounds[0]) * units) continue;
        found = true;
        ++step;
        source = int(candidate);
        item = bounds[0] + int(index / units);
        unit = int(index % units);
        return true;
      }
      step = 1;
      if (found) {
        ++turn;
      } else {
        turn = 0;
        ++round;
      }
      found = false;
    }
    return false;
  }

 private:
  NCCLEP_HD uint32_t spread() const { return (num_workers + num_ranks - 1) / num_ranks; }
};

}  // namespace ncclep
