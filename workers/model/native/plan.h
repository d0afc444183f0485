// How linears and the attention of one layer are cut into tasks.
//
// Rules
// - Results do not depend on it.
// - Before the last layer every row attends. In the last one only rows that sample do: of the others nothing but their
//   keys and values is ever read, so a prompt's rows end there.
// - Made by the caller before the threads run. A thread that is late knows counts from its job, and looks at tasks only
//   after it has claimed one.
#pragma once
#include <algorithm>
#include <new>
#include <vector>

#include "abi.h"
#include "attention.h"
#include "pool.h"

namespace fb {

constexpr long kBlock = 128;  // rows whose inputs stay in a core's cache while all columns pass by

// How a linear is cut into tasks: blocks of rows, and in each parts of the columns; enough tasks that a thread without
// a core costs little.
struct Grid {
  long rows, panels, blocks, parts;
  Grid(long rows, long columns, long threads) : rows(rows), panels(columns / kPanel), blocks((rows + kBlock - 1) / kBlock) {
    parts = std::max(1L, std::min(panels, (threads * 8 + blocks - 1) / std::max(1L, blocks)));
  }
  int tasks() const { return int(blocks * parts); }
  long row(long block) const { return rows * block / blocks; }
  long panel(long part) const { return panels * part / parts; }
};

struct Task {
  int chunk, row, rows, head, heads, split, splits;
  bool own;      // the chunk is this row alone: the task rotates its q, k and stores its k, v
  long partial;  // offset of its first query's partial result, when splits > 1
};

// What a job carries of it.
struct Counts {
  int tasks, spread;
  bool split;  // some context is longer than one split
};

struct Plan {
  std::vector<Task> tasks;
  std::vector<int> spread;  // rows that no task of their own rotates and stores
  long partial = 0;         // floats of partial results

  // `wanted`: the rows that attend, ascending; `count` of them, or null for all. A task of a prompt is many rows of one
  // head, one of a decode all heads of its row; where there are few of either they are cut finer, for all threads to have
  // some. Throws std::bad_alloc for too many tasks.
  Counts lay(const FbModel& m, const FbStep& s, int threads, const int* wanted, long count) {
    const int group = m.heads / m.kv_heads;
    const int tall = int(std::max(1L, std::min(long(kMaxQueries / group), count * m.kv_heads / (4 * threads))));
    const int wide = s.chunks < 4 * threads ? 1 : kMaxQueries / ((group + kQueries - 1) / kQueries * kQueries);
    tasks.clear();
    spread.clear();
    partial = 0;
    long next = 0;  // in `wanted`
    for (int c = 0; c < s.chunks; c++) {
      const int end = s.first[c] + s.count[c];
      for (int row = s.first[c]; row < end;) {
        int n = 0;
        if (!wanted) {
          n = std::min(end - row, tall);
        } else {
          while (n < tall && row + n < end && next < count && wanted[next] == row + n) n++, next++;
        }
        const bool own = n && s.count[c] == 1;
        for (int r = 0; r < std::max(n, 1) && !own; r++) spread.push_back(row + r);
        if (n) cut(m, s, wide, {c, row, n, 0, 0, 0, 0, own, 0});
        row += std::max(n, 1);
      }
    }
    if (tasks.size() > size_t(kMaxTasks)) throw std::bad_alloc();
    return {int(tasks.size()), int(spread.size()), partial > 0};
  }

 private:
  // One after the other: the heads of these rows, `wide` at a time when the row is its chunk's only one, and their splits.
  void cut(const FbModel& m, const FbStep& s, int wide, Task task) {
    const int context = s.positions[task.row + task.rows - 1] + 1;
    task.splits = (context + kSplit - 1) / kSplit;
    for (; task.head < m.kv_heads; task.head += task.heads) {
      task.heads = task.own ? std::min(wide, m.kv_heads - task.head) : 1;
      task.partial = partial;
      for (task.split = 0; task.split < task.splits; task.split++) tasks.push_back(task);
      if (task.splits > 1) partial += long(task.rows) * (m.heads / m.kv_heads) * task.heads * task.splits * (m.head_dim + 2);
    }
  }
};

}  // namespace fb
