// Which work on a stream comes after which: vector clocks, as race detectors for threads have them.
//
// Every kernel, collective and event is an entry of its stream and has a time there. A clock holds, for each
// stream, the time up to which its owner has waited for it. Streams have clocks, events carry a copy of one, and
// the host has one. Two uses of a storage on different streams race if neither stream has waited for the other.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace pretended {
using Stream = int64_t;
using Clock = std::map<Stream, int64_t>;
using Races = std::vector<std::string>;

inline void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, time] : other)
    if (into[stream] < time) into[stream] = time;
}

class Order {
 public:
  // The host launches on the stream, after all that it has waited for; returns the time of the new entry.
  int64_t launch(Stream stream) {
    std::lock_guard<std::mutex> held(lock_);
    merge(clocks_[stream], host_);
    return ++clocks_[stream][stream];
  }
  void record(int64_t event, Stream stream) {
    launch(stream);
    std::lock_guard<std::mutex> held(lock_);
    events_[event] = clocks_[stream];
  }
  void wait_for_event(Stream stream, int64_t event) {
    std::lock_guard<std::mutex> held(lock_);
    merge(clocks_[stream], events_[event]);
  }
  void wait_for_clock(Stream stream, const Clock& clock) {
    std::lock_guard<std::mutex> held(lock_);
    merge(clocks_[stream], clock);
  }
  Clock clock_of(Stream stream) {
    std::lock_guard<std::mutex> held(lock_);
    return clocks_[stream];
  }
  void host_waits_for(Stream stream) {
    std::lock_guard<std::mutex> held(lock_);
    merge(host_, clocks_[stream]);
  }
  void host_waits_for_event(int64_t event) {
    std::lock_guard<std::mutex> held(lock_);
    merge(host_, events_[event]);
  }
  void host_waits_for_all() {
    std::lock_guard<std::mutex> held(lock_);
    for (const auto& [stream, clock] : clocks_) merge(host_, clock);
  }

  // A storage's life: allocated on a stream, used on any, promised to others by record_stream, freed.
  void allocate(const void* storage, Stream stream) {
    if (!storage) return;
    std::lock_guard<std::mutex> held(lock_);
    uses_[storage] = Uses{stream, {}, {}, {}, true};
  }
  void record_stream(const void* storage, Stream stream) {
    std::lock_guard<std::mutex> held(lock_);
    auto found = uses_.find(storage);
    if (found != uses_.end()) found->second.promised.insert(stream);
  }
  // A use of the bytes [begin, end) of a storage: parts of it may be used on several streams at once.
  Races use(const void* storage, int64_t begin, int64_t end, bool writes, const std::string& name, Stream stream,
            int64_t time) {
    Races races;
    std::lock_guard<std::mutex> held(lock_);
    auto found = uses_.find(storage);
    if (!storage || found == uses_.end() || begin >= end) return races;
    auto& uses = found->second;
    if (uses.fresh) {
      uses.fresh = false;
      for (const auto& [other, entry, what] : left_[uses.home])
        if (!has_seen(stream, other, entry))
          races.push_back(name + " on stream " + std::to_string(stream) + " may use again the memory that stream " +
                          std::to_string(other) + " still " + what + "; no wait and no record_stream");
      left_[uses.home].clear();
    }
    for (const auto& write : uses.written)
      if (write.meets(begin, end) && !has_seen(stream, write.stream, write.time))
        races.push_back(name + (writes ? " writes" : " reads") + " on stream " + std::to_string(stream) + " what " +
                        write.name + " wrote on stream " + std::to_string(write.stream) + ", without waiting");
    if (writes) {
      for (const auto& read : uses.read)
        if (read.meets(begin, end) && !has_seen(stream, read.stream, read.time))
          races.push_back(name + " writes on stream " + std::to_string(stream) + " what is read on stream " +
                          std::to_string(read.stream) + ", without waiting");
      forget(uses.written, [&](const Use& use) { return use.within(begin, end); });
      forget(uses.read, [&](const Use& use) { return use.within(begin, end); });
      uses.written.push_back({begin, end, stream, time, name});
    } else {
      forget(uses.read, [&](const Use& use) { return use.stream == stream && use.within(begin, end); });
      uses.read.push_back({begin, end, stream, time, name});
    }
    return races;
  }
  // The caching allocator gives the memory to a later tensor of its own stream, which must by then have waited for
  // uses on others; after a record_stream the allocator itself waits.
  void free(const void* storage) {
    std::lock_guard<std::mutex> held(lock_);
    auto found = uses_.find(storage);
    if (!storage || found == uses_.end()) return;
    const Uses uses = found->second;
    uses_.erase(found);
    auto leave = [&](Stream stream, int64_t time, const std::string& what) {
      if (stream != uses.home && !uses.promised.count(stream) && !has_seen(uses.home, stream, time))
        left_[uses.home].push_back({stream, time, what});
    };
    for (const auto& write : uses.written) leave(write.stream, write.time, "writes (" + write.name + ")");
    for (const auto& read : uses.read) leave(read.stream, read.time, "reads (" + read.name + ")");
  }

 private:
  struct Use {
    int64_t begin, end;
    Stream stream;
    int64_t time;
    std::string name;
    bool meets(int64_t first, int64_t last) const { return begin < last && first < end; }
    bool within(int64_t first, int64_t last) const { return first <= begin && end <= last; }
  };
  template <class Which>
  static void forget(std::vector<Use>& uses, Which which) {
    uses.erase(std::remove_if(uses.begin(), uses.end(), which), uses.end());
  }
  struct Uses {
    Stream home;
    std::vector<Use> written, read;
    std::set<Stream> promised;
    bool fresh;  // allocated, and not used yet
  };
  struct Left { Stream stream; int64_t time; std::string what; };
  bool has_seen(Stream stream, Stream other, int64_t time) {
    if (stream == other) return true;
    auto known = clocks_[stream].find(other);
    return known != clocks_[stream].end() && known->second >= time;
  }
  std::mutex lock_;
  std::map<Stream, Clock> clocks_;
  std::map<int64_t, Clock> events_;
  Clock host_;
  std::map<const void*, Uses> uses_;
  std::map<Stream, std::vector<Left>> left_;  // of memory that was freed, by the stream of the allocation
};
}  // namespace pretended
