// The thread team: spin barrier inside a run, bounded spin then futex between runs (cpu-kernels.md 6 has the measurements).
//
//   caller (worker 0)      run_ops: publish job, epoch++, wake sleepers | op, barrier, op, barrier ... | return
//   worker i               spin ~200 us on epoch, else futex sleep      | op, barrier, op, barrier ... | spin again
//
// A waiter pauses, then sleeps, so a busy neighbour on the same CPU gets it instead of watching us spin. At a barrier it never yields: that would hand
// the CPU over for the neighbour's whole slice, some milliseconds, where a sleeper is put back as soon as it is woken. After a fork the child has no
// workers: the first run there starts new ones.
#include "rootlet/threads.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <climits>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace rootlet {
namespace {

constexpr uint64_t kIdleSpinNs = 200'000;
constexpr uint64_t kBarrierSpinNs = 50'000;  // about five times what sleeping and being woken costs

std::atomic<int> fork_count{0};

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(t.tv_nsec);
}

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)

void sleep_until_woken(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

std::vector<int> read_usable_cpus() {
  std::vector<int> cpus;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &set)) cpus.push_back(i);
    }
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

void allow_cpus(pthread_t thread, const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) CPU_SET(cpu, &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}

// Ties the calling thread to the team's first CPU, and gives it back the set that it had.
class HeldCaller {
 public:
  explicit HeldCaller(bool hold) : held_(hold && sched_getaffinity(0, sizeof before_, &before_) == 0) {
    if (held_) allow_cpus(pthread_self(), {first_cpu()});
  }
  ~HeldCaller() {
    if (held_) sched_setaffinity(0, sizeof before_, &before_);
  }
  HeldCaller(const HeldCaller&) = delete;
  HeldCaller& operator=(const HeldCaller&) = delete;

 private:
  static int first_cpu();
  cpu_set_t before_;
  bool held_;
};

#else  // no futex, no affinity: sleep in short naps, leave placement to the system

void sleep_until_woken(std::atomic<uint32_t>&, uint32_t) {
  const timespec nap{0, 50'000};
  nanosleep(&nap, nullptr);
}

void wake_all(std::atomic<uint32_t>&) {}

std::vector<int> read_usable_cpus() {
  const long count = sysconf(_SC_NPROCESSORS_ONLN);
  std::vector<int> cpus;
  for (int i = 0; i < (count < 1 ? 1 : count); ++i) cpus.push_back(i);
  return cpus;
}

void allow_cpus(pthread_t, const std::vector<int>&) {}

struct HeldCaller {
  explicit HeldCaller(bool) {}
  ~HeldCaller() {}
};

#endif

// Read once, before any pinning of ours narrows it.
const std::vector<int>& usable_cpus() {
  static const std::vector<int> cpus = read_usable_cpus();
  return cpus;
}

#if defined(__linux__)
int HeldCaller::first_cpu() { return usable_cpus()[0]; }
#endif

struct alignas(64) Taken {
  std::atomic<int> count{0};  // how many indices of one worker's share are handed out
};

// A value that waiters watch: moved on by one thread, waited for by many.
struct alignas(64) Signal {
  std::atomic<uint32_t> value{0};
  alignas(64) std::atomic<int> sleepers{0};

  void advance() {
    value.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) wake_all(value);
  }

  void sleep_while(uint32_t seen) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_seq_cst) == seen) sleep_until_woken(value, seen);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }

  void wait_in_run(uint32_t seen) {
    for (int i = 0; i < 256; ++i) {  // most partners are here by then, before the clock is read once
      if (value.load(std::memory_order_acquire) != seen) return;
      pause_cpu();
    }
    const uint64_t until = now_ns() + kBarrierSpinNs;
    do {
      for (int i = 0; i < 64; ++i) {
        if (value.load(std::memory_order_acquire) != seen) return;
        pause_cpu();
      }
    } while (now_ns() < until);
    sleep_while(seen);
  }

  void wait_between_runs(uint32_t seen) {
    const uint64_t until = now_ns() + kIdleSpinNs;
    do {
      for (int i = 0; i < 64; ++i) {
        if (value.load(std::memory_order_acquire) != seen) return;
        pause_cpu();
      }
      sched_yield();  // the caller may be waiting for this very CPU
    } while (now_ns() < until);
    sleep_while(seen);
  }
};

}  // namespace

class Team {
 public:
  Team(int size, bool pin) : size_(size), pin_(pin), workers_(new Worker[static_cast<size_t>(size)]), taken_(new Taken[static_cast<size_t>(size)]) {
    for (int i = 0; i < size; ++i) {
      workers_[i].thread_ = i;
      workers_[i].num_threads_ = size;
      workers_[i].team_ = this;
    }
  }

  ~Team() {
    if (!threads_.empty() && forks_seen_ == fork_count.load()) {
      stop_ = true;
      job_.advance();
      for (pthread_t t : threads_) pthread_join(t, nullptr);
    }
    for (int i = 0; i < size_; ++i) free(workers_[i].scratch_);
  }

  int size() const { return size_; }

  // `hold_caller`: keep the caller on its CPU meanwhile. Two system calls, so for whole steps only; and never longer than the run, since threads and
  // processes that the caller starts would inherit it.
  void run(const Op* ops, int count, OpTimer* timers, bool hold_caller) {
    const HeldCaller held(hold_caller && pinned());
    if (size_ > 1) {
      if (threads_.empty() || forks_seen_ != fork_count.load(std::memory_order_relaxed)) start();
      ops_ = ops;
      count_ = count;
      job_.advance();
    }
    if (timers) {
      enter<true>(workers_[0], ops, count, timers);
    } else {
      enter<false>(workers_[0], ops, count, nullptr);
    }
  }

  void barrier() {
    if (size_ == 1) {
      reset_counters();
      return;
    }
    const uint32_t seen = meet_.value.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      reset_counters();
      meet_.advance();
    } else {
      meet_.wait_in_run(seen);
    }
  }

  int take(int count) { return counter_.fetch_add(count, std::memory_order_relaxed); }

  std::atomic<int>& taken(int worker) { return taken_[worker].count; }

 private:
  void reset_counters() {
    counter_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size_; ++i) taken_[i].count.store(0, std::memory_order_relaxed);
  }

  template <bool kTimed>
  void enter(Worker& w, const Op* ops, int count, OpTimer* timers) {
    uint64_t begin = kTimed ? now_ns() : 0;
    for (int i = 0; i < count; ++i) {
      ops[i].fn(ops[i].args, w);
      const uint64_t done = kTimed ? now_ns() : 0;
      barrier();
      if constexpr (kTimed) {
        const uint64_t end = now_ns();
        timers[i].calls += 1;
        timers[i].ns += done - begin;
        timers[i].wait_ns += end - done;
        begin = end;
      }
    }
  }

  bool pinned() const { return pin_ && size_ > 1 && static_cast<int>(usable_cpus().size()) >= size_; }

  void start() {
    threads_.clear();  // after a fork these are threads of the parent
    arrived_ = 0;
    forks_seen_ = fork_count.load();
    const uint32_t seen = job_.value.load();
    const std::vector<int>& cpus = usable_cpus();
    const bool pin = pinned();
    for (int i = 1; i < size_; ++i) {
      auto* boot = new Boot{this, &workers_[i], seen};
      pthread_t t;
      if (pthread_create(&t, nullptr, &Team::main, boot) != 0) {
        delete boot;
        abandon(i);
        return;
      }
      if (pin) allow_cpus(t, {cpus[static_cast<size_t>(i)]});
      threads_.push_back(t);
    }
  }

  // The machine refuses another thread: go on with those that exist.
  void abandon(int size) {
    size_ = size;
    for (int i = 0; i < size; ++i) workers_[i].num_threads_ = size;
  }

  struct Boot {
    Team* team;
    Worker* worker;
    uint32_t seen;
  };

  static void* main(void* p) {
    std::unique_ptr<Boot> boot(static_cast<Boot*>(p));
    Team& team = *boot->team;
    uint32_t seen = boot->seen;
    for (;;) {
      team.job_.wait_between_runs(seen);
      ++seen;
      if (team.stop_) return nullptr;
      team.enter<false>(*boot->worker, team.ops_, team.count_, nullptr);
    }
  }

  int size_;
  bool pin_;
  std::unique_ptr<Worker[]> workers_;
  std::unique_ptr<Taken[]> taken_;
  std::vector<pthread_t> threads_;
  int forks_seen_ = 0;
  const Op* ops_ = nullptr;
  int count_ = 0;
  bool stop_ = false;
  Signal job_;
  Signal meet_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> counter_{0};
};

void Worker::barrier() { team_->barrier(); }

int Worker::take(int count) { return team_->take(count); }

int Worker::take_near(int n) {
  for (int i = 0; i < num_threads_; ++i) {
    const int owner = (thread_ + i) % num_threads_;
    const Range share = share_of(n, 1, owner, num_threads_);
    std::atomic<int>& taken = team_->taken(owner);
    if (taken.load(std::memory_order_relaxed) >= share.end - share.begin) continue;
    const int index = share.begin + taken.fetch_add(1, std::memory_order_relaxed);
    if (index < share.end) return index;
  }
  return n;
}

Range Worker::share(int n, int align) const { return share_of(n, align, thread_, num_threads_); }

void* Worker::scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    free(scratch_);
    scratch_bytes_ = (bytes + 4095) / 4096 * 4096;
    scratch_ = aligned_alloc(64, scratch_bytes_);
    if (!scratch_) abort();
  }
  return scratch_;
}

namespace {

std::mutex& team_mutex() {
  static auto* m = new std::mutex;  // never destroyed: worker threads may outlive static destructors
  return *m;
}

Team*& team_slot() {
  static Team* team = nullptr;
  return team;
}

Team& team() {
  Team*& t = team_slot();
  if (!t) {
    pthread_atfork(
        [] { team_mutex().lock(); }, [] { team_mutex().unlock(); },
        [] {
          fork_count.fetch_add(1);
          team_mutex().unlock();
        });
    t = new Team(num_usable_cpus(), true);
  }
  return *t;
}

}  // namespace

int num_usable_cpus() { return static_cast<int>(usable_cpus().size()); }

int team_size() {
  std::lock_guard<std::mutex> lock(team_mutex());
  return team().size();
}

void set_team(int size, bool pin) {
  num_usable_cpus();
  std::lock_guard<std::mutex> lock(team_mutex());
  team();
  delete team_slot();
  team_slot() = new Team(size, pin);
}

void run_ops(const Op* ops, int count, OpTimer* timers, bool whole_step) {
  if (count == 0) return;
  std::lock_guard<std::mutex> lock(team_mutex());
  team().run(ops, count, timers, whole_step);
}

}  // namespace rootlet
