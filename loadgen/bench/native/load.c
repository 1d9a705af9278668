// HTTP load client for the relay bench: one thread, epoll, loopback only. Prints one JSON object.
//
//   load -P port [-c connections] [-n requests a connection] [-m max_tokens] [-i interval_us] [-s] [-r ramp_ms]
//        [-R requests a second] [-b prompt bytes] [-T limit_s]
//
// Closed loop: each connection sends its next request when the last was answered, the first ones spread over ramp_ms.
// Open loop (-R): requests are due at fixed times on whichever connection is idle; latency counts from the due time.
// -s streams; interval_us is told to the mock as "seed". Events are counted and timed by the stamps the mock puts in
// them.
//
// Output: completed, errors (lost or cut connections, other statuses, wrong number of events), wall_s, chunks, reads
// (with chunks, how far they came singly), and percentiles in us: first (request to first byte of the body), way (event
// sent by the mock to event read here), total (request to end).
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 512, READ = 1 << 18, HEAD = 4096, STAMP = 18, CARRY = STAMP - 1, ENDING = 7 };

typedef struct {
  float *values;
  size_t count, capacity;
} samples;

typedef struct {
  int fd, busy, in_body, chunked;
  long requests;     // sent so far
  long events;       // of this answer
  long length, got;  // of this body; length -1 without content-length
  uint64_t begun;    // when the request was sent, or due
  char head[HEAD];   // what has come of the answer's head
  size_t head_length;
  char carry[CARRY];  // a stamp cut by the end of a read
  size_t carried;
  char ending[ENDING];  // the last bytes of a chunked body
} conn;

static struct {
  int port, connections, stream;
  long requests, max_tokens, interval_us, ramp_ms, prompt_bytes;
  double rate, limit_s;
} options = {.connections = 1, .requests = 1, .max_tokens = 16, .prompt_bytes = 512, .limit_s = 60};

static int epoll_fd;
static char *request;
static size_t request_length;
static conn *conns;
static int *idle, idle_count;  // open loop: connections without a request
static long issued, completed, errors, chunks, reads;
static uint64_t last_end;
static samples first, way, total;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void add(samples *s, double value) {
  if (s->count == s->capacity) {
    s->capacity = s->capacity ? s->capacity * 2 : 1 << 16;
    s->values = realloc(s->values, s->capacity * sizeof *s->values);
  }
  s->values[s->count++] = value;
}

static int compare(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static double percentile(const samples *s, double q) { return s->count ? s->values[(size_t)(q * (s->count - 1))] : -1; }

static void build_request(void) {
  char *prompt = malloc(options.prompt_bytes + 1);
  for (long i = 0; i < options.prompt_bytes; i++) prompt[i] = i % 6 == 5 ? ' ' : 'a' + i * 7 % 26;
  prompt[options.prompt_bytes] = 0;
  char *body;
  int n = asprintf(&body,
                   "{\"model\":\"mock\",\"prompt\":\"%s\",\"max_tokens\":%ld,\"temperature\":0.0,\"seed\":%ld,"
                   "\"stream\":%s}",
                   prompt, options.max_tokens, options.interval_us, options.stream ? "true" : "false");
  request_length = asprintf(&request,
                            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: load\r\n"
                            "Accept: */*\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                            options.port, n, body);
  free(body);
  free(prompt);
}

static void open_conn(conn *c) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(options.port)};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int on = 1;
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (c->fd < 0 || connect(c->fd, (void *)&to, sizeof to)) {
    perror("load: connect");
    exit(1);
  }
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e);
}

static void send_request(conn *c, uint64_t begun) {
  c->busy = 1;
  c->in_body = c->chunked = 0;
  c->events = c->got = 0;
  c->length = -1;
  c->head_length = c->carried = 0;
  memset(c->ending, 0, sizeof c->ending);
  c->begun = begun;
  c->requests++;
  issued++;
  // A failed send shows as a closed connection on the next read.
  if (send(c->fd, request, request_length, MSG_NOSIGNAL) != (ssize_t)request_length) shutdown(c->fd, SHUT_RDWR);
}

// The answer is over, whole or not: the connection is free for its next request.
static void end_request(conn *c, uint64_t now, int good) {
  c->busy = 0;
  if (good) {
    completed++;
    last_end = now;
    add(&total, (now - c->begun) / 1e3);
  } else {
    errors++;
  }
  if (options.rate > 0)
    idle[idle_count++] = c - conns;
  else if (c->requests < options.requests)
    send_request(c, now);
}

// Take bytes of the head; how many of them belong to it, -1 while it is not complete.
static ssize_t take_head(conn *c, const char *bytes, size_t n) {
  size_t before = c->head_length, room = sizeof c->head - 1 - before;
  memcpy(c->head + before, bytes, n < room ? n : room);
  c->head_length += n < room ? n : room;
  c->head[c->head_length] = 0;
  char *end = strstr(c->head, "\r\n\r\n");
  if (!end) return -1;
  end[2] = 0;
  c->in_body = 1;
  char *field = strcasestr(c->head, "\r\ncontent-length:");
  if (field) c->length = atol(field + 17);
  c->chunked = strcasestr(c->head, "\r\ntransfer-encoding: chunked") != 0;
  return end + 4 - c->head - before;
}

// Count and time the events in these bytes, of which CARRY bytes before the start may be overwritten.
static void take_events(conn *c, char *bytes, size_t n, uint64_t now) {
  char *p = bytes - c->carried, *end = bytes + n;
  memcpy(p, c->carry, c->carried);
  c->carried = 0;
  while ((p = memchr(p, '@', end - p))) {
    if (end - p < STAMP) {
      c->carried = end - p;
      memcpy(c->carry, p, c->carried);
      return;
    }
    if (p[1] != '@') {
      p++;
      continue;
    }
    uint64_t stamp = 0;
    for (int i = 2; i < STAMP; i++) stamp = stamp * 10 + (p[i] - '0');
    add(&way, (now - stamp) / 1e3);
    chunks++;
    c->events++;
    p += STAMP;
  }
}

// Whether the body ends with these bytes.
static int take_body(conn *c, const char *bytes, size_t n) {
  c->got += n;
  if (!c->chunked) return c->length >= 0 && c->got >= c->length;
  if (n >= ENDING) {
    memcpy(c->ending, bytes + n - ENDING, ENDING);
  } else {
    memmove(c->ending, c->ending + n, ENDING - n);
    memcpy(c->ending + ENDING - n, bytes, n);
  }
  return memcmp(c->ending, "\r\n0\r\n\r\n", ENDING) == 0;
}

static void receive(conn *c) {
  static char space[CARRY + READ];
  char *bytes = space + CARRY;
  ssize_t n = recv(c->fd, bytes, READ, MSG_DONTWAIT);
  if (n < 0 && errno == EAGAIN) return;
  uint64_t now = now_ns();
  if (n <= 0) {
    close(c->fd);
    open_conn(c);
    if (c->busy) end_request(c, now, 0);
    return;
  }
  if (!c->busy) return;
  reads++;
  if (!c->in_body) {
    ssize_t head = take_head(c, bytes, n);
    if (head < 0) return;
    bytes += head;
    n -= head;
  }
  if (n && !c->got) add(&first, (now - c->begun) / 1e3);
  // The body's first bytes may follow the head in one read, so the carry may reach into the head: it is read no more.
  if (options.stream && n) take_events(c, bytes, n, now);
  if (!take_body(c, bytes, n)) return;
  int good = strncmp(c->head + 9, "200", 3) == 0 && (!options.stream || c->events == options.max_tokens);
  end_request(c, now, good);
}

// Send what is due; ns until the next is, 0 if none will be.
static uint64_t send_due(uint64_t start) {
  long all = options.connections * options.requests;
  uint64_t now = now_ns();
  if (options.rate > 0) {
    for (; issued < all; now = now_ns()) {
      uint64_t due = start + (uint64_t)(issued * 1e9 / options.rate);
      if (due > now) return due - now;
      if (!idle_count) return 0;
      send_request(&conns[idle[--idle_count]], due);
    }
    return 0;
  }
  static int begun;
  for (; begun < options.connections; begun++) {
    uint64_t due = start + (uint64_t)(options.ramp_ms * 1e6 * begun / options.connections);
    if (due > now) return due - now;
    send_request(&conns[begun], now);
  }
  return 0;
}

static void report(uint64_t start) {
  samples *all[] = {&first, &way, &total};
  const char *names[] = {"first", "way", "total"};
  printf("{\"completed\": %ld, \"errors\": %ld, \"wall_s\": %.4f, \"chunks\": %ld, \"reads\": %ld", completed, errors,
         ((last_end ? last_end : now_ns()) - start) / 1e9, chunks, reads);
  for (int i = 0; i < 3; i++) {
    qsort(all[i]->values, all[i]->count, sizeof(float), compare);
    printf(", \"%s_p50_us\": %.1f, \"%s_p99_us\": %.1f", names[i], percentile(all[i], 0.5), names[i],
           percentile(all[i], 0.99));
  }
  printf("}\n");
}

int main(int argc, char **argv) {
  int option;
  while ((option = getopt(argc, argv, "P:c:n:m:i:sr:R:b:T:")) != -1) {
    switch (option) {
      case 'P': options.port = atoi(optarg); break;
      case 'c': options.connections = atoi(optarg); break;
      case 'n': options.requests = atol(optarg); break;
      case 'm': options.max_tokens = atol(optarg); break;
      case 'i': options.interval_us = atol(optarg); break;
      case 's': options.stream = 1; break;
      case 'r': options.ramp_ms = atol(optarg); break;
      case 'R': options.rate = atof(optarg); break;
      case 'b': options.prompt_bytes = atol(optarg); break;
      case 'T': options.limit_s = atof(optarg); break;
      default: return 2;
    }
  }
  build_request();
  epoll_fd = epoll_create1(0);
  conns = calloc(options.connections, sizeof *conns);
  idle = malloc(options.connections * sizeof *idle);
  for (int i = 0; i < options.connections; i++) {
    open_conn(&conns[i]);
    idle[idle_count++] = i;
  }
  uint64_t start = now_ns();
  long all = options.connections * options.requests;
  static struct epoll_event events[EVENTS];
  while (completed + errors < all && (now_ns() - start) / 1e9 < options.limit_s) {
    uint64_t wait = send_due(start);
    struct timespec timeout = {0, wait && wait < 100000000 ? wait : 100000000};
    int n = epoll_pwait2(epoll_fd, events, EVENTS, &timeout, 0);
    for (int i = 0; i < n; i++) receive(events[i].data.ptr);
  }
  errors += all - completed - errors;  // what did not end within the limit
  report(start);
  return 0;
}
