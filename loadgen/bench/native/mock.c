// Mock of vLLM prefill and decode servers behind a PD proxy: HTTP/1.1 with keep-alive, one thread, epoll, loopback
// only.
//
//   mock [-H FRAMES:PORT] PORT:ROLE...        ROLE is p (prefill) or d (decode)
//
// Prefill answers at once with NIXL's kv_transfer_params; with -H it first pushes the request's signature (see hook.h),
// as the hook in a real engine does. Decode answers at once, or, for "stream": true, with max_tokens server-sent
// events, one HTTP chunk and one send() each, every "seed" microseconds (0: all at once). Each event carries "@@" and
// the 16 digits of CLOCK_MONOTONIC in nanoseconds, by which the client measures its way.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "hook.h"

enum { EVENTS = 1024, READ = 1 << 16, DIGITS = 16 };

typedef struct {
  char *bytes;
  size_t length, capacity;
} buffer;

typedef struct conn {
  int fd, role, listening, writable_wanted;
  buffer in, out;
  size_t sent;        // of out
  int streaming;      // inside a streamed answer
  int chat;           // which kind of event
  long left;          // events still to send
  uint64_t interval;  // ns between two
  uint64_t due;
  int heap_index;  // -1: no timer
} conn;

typedef struct {
  char text[1024];
  int length, stamp_at;
} event_template;

static int epoll_fd;
static buffer prefill_answer, decode_answer;
static event_template templates[2];
static const char STREAM_HEAD[] =
    "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    "content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
static const char STREAM_END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char *const EVENTS_JSON[2] = {
    "data: {\"id\":\"cmpl-3f0e4c1f9a7b4b0c8f6f2f1f7d1a9b3c\",\"object\":\"text_completion\",\"created\":1764500000,"
    "\"model\":\"mock\",\"choices\":[{\"index\":0,\"text\":\"@@0000000000000000\",\"logprobs\":null,"
    "\"finish_reason\":null,\"stop_reason\":null,\"token_ids\":null}],\"usage\":null}\n\n",
    "data: {\"id\":\"chatcmpl-3f0e4c1f9a7b4b0c8f6f2f1f7d1a9b3c\",\"object\":\"chat.completion.chunk\","
    "\"created\":1764500000,\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"@@0000000000000000\"}"
    ","
    "\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}]}\n\n"};
static const char PREFILL_JSON[] =
    "{\"id\":\"cmpl-3f0e4c1f9a7b4b0c8f6f2f1f7d1a9b3c\",\"object\":\"text_completion\",\"created\":1764500000,"
    "\"model\":\"mock\",\"choices\":[{\"index\":0,\"text\":\" the\",\"logprobs\":null,\"finish_reason\":\"length\","
    "\"stop_reason\":null,\"prompt_logprobs\":null,\"message\":{\"role\":\"assistant\",\"content\":\" the\"}}],"
    "\"usage\":{\"prompt_tokens\":135,\"total_tokens\":136,\"completion_tokens\":1,\"prompt_tokens_details\":null},"
    "\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
    "\"remote_block_ids\":[[101,102,103,104,105,106,107,108,109]],"
    "\"remote_engine_id\":\"2f3c6f1e-9df4-4c0f-8a3e-7c4a0b6d5e11\",\"remote_request_id\":\"cmpl-3f0e4c1f-0\","
    "\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,\"tp_size\":1,\"eldr\":{\"id\":"
    "\"3f0e4c1f9a7b4b0c8f6f2f1f7d1a9b3c\",\"blocks\":8}}}";
static const char DECODE_JSON[] =
    "{\"id\":\"cmpl-3f0e4c1f9a7b4b0c8f6f2f1f7d1a9b3c\",\"object\":\"text_completion\",\"created\":1764500000,"
    "\"model\":\"mock\",\"choices\":[{\"index\":0,\"text\":\" the quick brown fox jumps over the lazy dog and then "
    "some "
    "more words\",\"logprobs\":null,\"finish_reason\":\"length\",\"stop_reason\":null,\"prompt_logprobs\":null}],"
    "\"usage\":{\"prompt_tokens\":135,\"total_tokens\":151,\"completion_tokens\":16,\"prompt_tokens_details\":null},"
    "\"kv_transfer_params\":null}";
static const char MODELS_JSON[] =
    "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\","
    "\"created\":1764500000,\"owned_by\":\"vllm\",\"root\":\"mock\",\"parent\":null,"
    "\"max_model_len\":32768}]}";

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void append(buffer *b, const char *bytes, size_t n) {
  if (b->length + n > b->capacity) {
    b->capacity = (b->length + n) * 2;
    b->bytes = realloc(b->bytes, b->capacity);
  }
  memcpy(b->bytes + b->length, bytes, n);
  b->length += n;
}

static void append_json(buffer *b, const char *json) {
  char head[256];
  int n = snprintf(head, sizeof head,
                   "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
                   "content-length: %zu\r\ncontent-type: application/json\r\n\r\n",
                   strlen(json));
  append(b, head, n);
  append(b, json, strlen(json));
}

// -- timers: a binary heap of streams by the time their next event is due
// ------------------------------------------------

static conn **heap;
static int heap_size, heap_capacity;

static void heap_place(int i, conn *c) {
  heap[i] = c;
  c->heap_index = i;
}

static void heap_up(int i) {
  conn *c = heap[i];
  for (; i && heap[(i - 1) / 2]->due > c->due; i = (i - 1) / 2) heap_place(i, heap[(i - 1) / 2]);
  heap_place(i, c);
}

static void heap_down(int i) {
  conn *c = heap[i];
  for (;;) {
    int child = 2 * i + 1;
    if (child >= heap_size) break;
    if (child + 1 < heap_size && heap[child + 1]->due < heap[child]->due) child++;
    if (heap[child]->due >= c->due) break;
    heap_place(i, heap[child]);
    i = child;
  }
  heap_place(i, c);
}

static void heap_add(conn *c) {
  if (heap_size == heap_capacity) {
    heap_capacity = heap_capacity ? heap_capacity * 2 : 1024;
    heap = realloc(heap, heap_capacity * sizeof *heap);
  }
  heap_place(heap_size, c);
  heap_up(heap_size++);
}

static void heap_remove(conn *c) {
  int i = c->heap_index;
  if (i < 0) return;
  c->heap_index = -1;
  conn *last = heap[--heap_size];
  if (last == c) return;
  heap_place(i, last);
  heap_up(i);
  heap_down(last->heap_index);
}

// -- connections
// ---------------------------------------------------------------------------------------------------------

static conn *graveyard[65536];  // freed after the batch: later events may still point at them
static int buried;

static void close_conn(conn *c) {
  if (c->fd < 0) return;
  heap_remove(c);
  close(c->fd);
  c->fd = -1;
  graveyard[buried++] = c;
}

static void want_writable(conn *c, int wanted) {
  if (c->writable_wanted == wanted) return;
  c->writable_wanted = wanted;
  struct epoll_event e = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = c};
  epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

static void flush(conn *c) {
  while (c->sent < c->out.length) {
    ssize_t n = send(c->fd, c->out.bytes + c->sent, c->out.length - c->sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN) {
      want_writable(c, 1);
      return;
    }
    if (n < 0) {
      close_conn(c);
      return;
    }
    c->sent += n;
  }
  c->sent = c->out.length = 0;
  want_writable(c, 0);
}

// -- answers
// -------------------------------------------------------------------------------------------------------------

static void make_template(int chat) {
  event_template *t = &templates[chat];
  const char *json = EVENTS_JSON[chat];
  t->length = snprintf(t->text, sizeof t->text, "%zx\r\n%s\r\n", strlen(json), json);
  t->stamp_at = strstr(t->text, "@@") - t->text + 2;
}

static void send_event(conn *c) {
  event_template *t = &templates[c->chat];
  uint64_t stamp = now_ns();
  for (int i = DIGITS - 1; i >= 0; i--, stamp /= 10) t->text[t->stamp_at + i] = '0' + stamp % 10;
  append(&c->out, t->text, t->length);
  flush(c);
  if (c->fd < 0 || --c->left) return;
  append(&c->out, STREAM_END, sizeof STREAM_END - 1);
  c->streaming = 0;
  flush(c);
}

// Where the value of "key" starts in a JSON body without nested uses of the key, 0 if it has none.
static const char *value_of(const char *body, size_t n, const char *key) {
  const char *p = memmem(body, n, key, strlen(key));
  if (!p) return 0;
  p += strlen(key);
  while (*p == ' ' || *p == ':') p++;
  return p;
}

static long number_of(const char *body, size_t n, const char *key, long otherwise) {
  const char *p = value_of(body, n, key);
  return p && *p >= '0' && *p <= '9' ? atol(p) : otherwise;
}

static void answer_get(conn *c, const char *path) {
  append_json(&c->out, strncmp(path, "/v1/models", 10) == 0 ? MODELS_JSON : "{}");
  flush(c);
}

static void answer_prefill(conn *c, const char *body, size_t n) {
  const char *id = value_of(body, n, "\"eldr_id\"");
  if (id && body + n - id > HOOK_ID + 1 && id[HOOK_ID + 1] == '"') hook_push(id + 1);
  append(&c->out, prefill_answer.bytes, prefill_answer.length);
  flush(c);
}

static void answer_decode(conn *c, const char *body, size_t n) {
  const char *stream = value_of(body, n, "\"stream\"");
  if (!stream || *stream != 't') {
    append(&c->out, decode_answer.bytes, decode_answer.length);
    flush(c);
    return;
  }
  c->left = number_of(body, n, "\"max_tokens\"", 16);
  c->interval = number_of(body, n, "\"seed\"", 0) * 1000;
  c->streaming = 1;
  append(&c->out, STREAM_HEAD, sizeof STREAM_HEAD - 1);
  c->due = now_ns() + c->interval;
  send_event(c);
  while (!c->interval && c->fd >= 0 && c->streaming) send_event(c);
  if (c->fd >= 0 && c->streaming) heap_add(c);
}

static void tick(void) {
  uint64_t now = now_ns();
  while (heap_size && heap[0]->due <= now) {
    conn *c = heap[0];
    send_event(c);
    if (c->fd < 0) continue;
    if (!c->streaming) {
      heap_remove(c);
      continue;
    }
    c->due += c->interval;
    if (c->due < now) c->due = now;
    heap_down(0);
  }
}

// -- requests
// ------------------------------------------------------------------------------------------------------------

static size_t content_length(const char *head, const char *end) {
  for (const char *line = head; (line = memchr(line, '\n', end - line)) && ++line < end;)
    if (!strncasecmp(line, "content-length:", 15)) return atol(line + 15);
  return 0;
}

// Serve the whole requests in c->in. Clients must not pipeline behind a streamed answer.
static void serve(conn *c) {
  while (c->in.length && c->fd >= 0 && !c->streaming) {
    char *request = c->in.bytes, *end = memmem(request, c->in.length, "\r\n\r\n", 4);
    if (!end) return;
    size_t head = end - request + 4, body = content_length(request, end + 2);
    if (c->in.length < head + body) return;
    c->chat = memmem(request, head < 64 ? head : 64, "/chat/", 6) != 0;
    if (request[0] == 'G')
      answer_get(c, request + 4);
    else if (c->role == 'p')
      answer_prefill(c, request + head, body);
    else
      answer_decode(c, request + head, body);
    c->in.length -= head + body;
    memmove(c->in.bytes, c->in.bytes + head + body, c->in.length);
  }
}

static void receive(conn *c) {
  static char bytes[READ];
  ssize_t n = recv(c->fd, bytes, sizeof bytes, 0);
  if (n < 0 && errno == EAGAIN) return;
  if (n <= 0) {
    close_conn(c);
    return;
  }
  append(&c->in, bytes, n);
  serve(c);
}

static void accept_all(const conn *listener) {
  int fd, on = 1;
  while ((fd = accept4(listener->fd, 0, 0, SOCK_NONBLOCK)) >= 0) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    conn *c = calloc(1, sizeof *c);
    c->fd = fd;
    c->role = listener->role;
    c->heap_index = -1;
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
  }
}

static int listen_on(int port, int role) {
  conn *c = calloc(1, sizeof *c);
  int on = 1;
  *c = (conn){.fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), .role = role, .listening = 1, .heap_index = -1};
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(port)};
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  setsockopt(c->fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(c->fd, (void *)&here, sizeof here) || listen(c->fd, 4096)) return -1;
  struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
  return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e);
}

static void handle(conn *c, uint32_t events) {
  if (c->listening) {
    accept_all(c);
    return;
  }
  if (c->fd >= 0 && events & EPOLLOUT) flush(c);
  if (c->fd >= 0 && events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(c);
}

// Wait for events, at most until the next stream is due.
static int await(struct epoll_event *events) {
  if (!heap_size) return epoll_wait(epoll_fd, events, EVENTS, -1);
  uint64_t now = now_ns(), wait = heap[0]->due > now ? heap[0]->due - now : 0;
  struct timespec timeout = {wait / 1000000000, wait % 1000000000};
  return epoll_pwait2(epoll_fd, events, EVENTS, &timeout, 0);
}

int main(int argc, char **argv) {
  int option;
  epoll_fd = epoll_create1(0);
  while ((option = getopt(argc, argv, "H:")) != -1) {
    char *colon = option == 'H' ? strrchr(optarg, ':') : 0;
    if (!colon) return 2;
    *colon = 0;
    if (hook_load(optarg, atoi(colon + 1))) {
      perror("mock: frames");
      return 1;
    }
  }
  for (int i = optind; i < argc; i++) {
    const char *colon = strchr(argv[i], ':');
    if (!colon || listen_on(atoi(argv[i]), colon[1])) {
      perror("mock: listen");
      return 1;
    }
  }
  signal(SIGPIPE, SIG_IGN);
  make_template(0);
  make_template(1);
  append_json(&prefill_answer, PREFILL_JSON);
  append_json(&decode_answer, DECODE_JSON);
  static struct epoll_event events[EVENTS];
  for (;;) {
    int n = await(events);
    for (int i = 0; i < n; i++) handle(events[i].data.ptr, events[i].events);
    tick();
    for (int i = 0; i < buried; i++) {
      free(graveyard[i]->in.bytes);
      free(graveyard[i]->out.bytes);
      free(graveyard[i]);
    }
    buried = 0;
  }
}
