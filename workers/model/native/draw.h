// A token drawn from a row of logits: temperature, top_k, top_p, min_p, one uniform number. The rules are those of
// model/sampler.py, which does everything else: probabilities are fp32, sums of them fp64, whatever equals a cut stays.
#pragma once
#include <algorithm>
#include <vector>

#include "vec.h"

namespace fb {

constexpr int kPiece = 64;        // tokens whose probabilities are summed before anything is accumulated
constexpr float kReach = 8;        // tokens so far below the best one are looked at first for top_k and top_p
constexpr int kNotFinite = -2;    // a row for the sampler: it knows what NaN and infinity mean

struct Choice {
  float temperature, top_p, min_p;  // temperature 0: the most likely token
  int top_k;
  double number;  // in [0, 1)
};

// With the working memory of one thread; nothing is allocated later.
struct Draw {
  std::vector<float> scaled, chance, near;
  std::vector<double> ends;

  explicit Draw(int vocab) : scaled(padded(vocab)), chance(padded(vocab)), ends(padded(vocab) / kPiece) { near.reserve(vocab); }

  static int padded(int vocab) { return (vocab + kPiece - 1) / kPiece * kPiece; }

  // The drawn token, or kNotFinite.
  int operator()(const float* logits, int vocab, const Choice& choice) {
    const int whole = padded(vocab);
    if (!scale(logits, vocab, whole, choice.temperature)) return kNotFinite;
    float cut = -INFINITY;
    if (choice.top_k > 0 && choice.top_k < vocab) cut = kth(vocab, choice.top_k);
    if (choice.top_p < 1) cut = nucleus(vocab, whole, choice.top_p, cut);
    if (choice.min_p > 0) cut = std::max(cut, std::log(std::min(choice.min_p, 1.f)));
    const double total = weigh(whole, cut);
    const double target = std::min(choice.number * total, std::nextafter(total, 0.0));
    const int pieces = whole / kPiece;
    int piece = int(std::upper_bound(ends.begin(), ends.begin() + pieces, target) - ends.begin());
    piece = std::min(piece, pieces - 1);
    double sum = piece ? ends[piece - 1] : 0;
    int last = piece * kPiece;
    for (int i = piece * kPiece; i < (piece + 1) * kPiece; i++) {
      if (chance[i] > 0) last = i;
      sum += chance[i];
      if (sum > target) break;
    }
    return std::min(last, vocab - 1);
  }

 private:
  // (logit - best) / temperature of every token, -inf behind the last. False when a logit is not finite.
  bool scale(const float* logits, int vocab, int whole, float temperature) {
    V top = set1(-INFINITY), odd = zero();
    const int full = vocab / 16 * 16;
    for (int i = 0; i < full; i += 16) {
      const V v = load(logits + i);
      top = max(top, v);
      odd = add(odd, mul(v, zero()));  // NaN from then on when one is not finite
    }
    float best = hmax(top), wrong = hsum(odd);
    for (int i = full; i < vocab; i++) {
      best = std::max(best, logits[i]);
      wrong += logits[i] * 0.f;
    }
    if (!(wrong == 0)) return false;
    const V b = set1(best), t = set1(temperature);
    for (int i = 0; i < full; i += 16) store(scaled.data() + i, div(sub(load(logits + i), b), t));
    for (int i = full; i < vocab; i++) scaled[i] = (logits[i] - best) / temperature;
    std::fill(scaled.begin() + vocab, scaled.begin() + whole, -INFINITY);
    return true;
  }

  // Those within `reach` of the best, highest first.
  void gather(int vocab, float reach) {
    near.clear();
    for (int i = 0; i < vocab; i++)
      if (scaled[i] >= -reach) near.push_back(scaled[i]);
    std::sort(near.begin(), near.end(), std::greater<float>());
  }

  // The k-th highest.
  float kth(int vocab, int k) {
    for (float reach = kReach;; reach = reach < 64 ? 2 * reach : INFINITY) {
      gather(vocab, reach);
      if (k <= int(near.size())) return near[k - 1];
    }
  }

  // The lowest of the fewest highest tokens that hold `wanted` of the mass of all that are at least `floor`.
  float nucleus(int vocab, int whole, float wanted, float floor) {
    const double goal = double(wanted) * weigh(whole, floor);
    for (float reach = kReach;; reach = reach < 64 ? 2 * reach : INFINITY) {
      gather(vocab, reach);
      double before = 0;
      for (size_t i = 0; i < near.size(); i++) {
        if (near[i] < floor) return floor;
        alignas(64) float p[16];
        store(p, exp(set1(near[i])));
        before += p[0];
        if (before >= goal) return near[i];
      }
      if (reach == INFINITY) return floor;
    }
  }

  // Probabilities (of the best token 1) of what is at least `cut`, and their sums piece by piece. The sum of all.
  double weigh(int whole, float cut) {
    const V none = zero();
    double sum = 0;
    for (int i = 0; i < whole; i += kPiece) {
      for (int j = i; j < i + kPiece; j += 16) {
        const V s = load(scaled.data() + j);
        store(chance.data() + j, hmax(s) < cut || hmax(s) == -INFINITY ? none : exp(s));
      }
      double own[4] = {0, 0, 0, 0};
      for (int j = i; j < i + kPiece; j += 4)
        for (int k = 0; k < 4; k++) {
          if (scaled[j + k] < cut || scaled[j + k] == -INFINITY) chance[j + k] = 0;
          own[k] += chance[j + k];
        }
      sum += (own[0] + own[1]) + (own[2] + own[3]);
      ends[i / kPiece] = sum;
    }
    return sum;
  }
};

}  // namespace fb
