// Working memory of the kernel: aligned, in huge pages where there are any, never moved.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace fb {

constexpr size_t kHuge = size_t(2) << 20;

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// `count` zeroed values. Throws std::bad_alloc.
template <class T>
struct Array {
  explicit Array(size_t count) {
    const size_t size = count * sizeof(T), align = size < kHuge ? 64 : kHuge;
    const size_t rounded = (size + align - 1) / align * align + align;  // a prefetch may reach beyond the end
    void* p = std::aligned_alloc(align, rounded);
    if (!p) throw std::bad_alloc();
    at.reset(static_cast<T*>(p));
#if defined(MADV_HUGEPAGE)
    if (size >= kHuge) madvise(p, rounded, MADV_HUGEPAGE);
#endif
    std::memset(p, 0, size);
  }
  T* data() { return at.get(); }
  const T* data() const { return at.get(); }
  std::unique_ptr<T, Free> at;
};

}  // namespace fb
