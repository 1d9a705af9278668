// Byte relay: the floor under every proxy. Copies TCP bytes both ways and looks at nothing.
//
//   relay LISTEN_PORT TARGET_PORT
//
// One thread, epoll, loopback only. A side whose peer cannot take more is not read until the peer has drained.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { EVENTS = 1024, BUFFER = 1 << 16 };

typedef struct side {
  int fd;
  struct side *peer;
  char *pending;  // bytes this side's socket did not take
  size_t offset, length;
  int paused, closed;
} side;

static int epoll_fd;
static side *graveyard[2 * EVENTS];  // freed after the batch: later events may still point at them
static int buried;

static void watch(side *s, int operation) {
  struct epoll_event e = {.events = (s->paused ? 0 : EPOLLIN) | (s->length ? EPOLLOUT : 0), .data.ptr = s};
  epoll_ctl(epoll_fd, operation, s->fd, &e);
}

static void close_pair(side *s) {
  if (s->closed) return;
  side *pair[] = {s, s->peer};
  for (int i = 0; i < 2; i++) {
    pair[i]->closed = 1;
    close(pair[i]->fd);
    graveyard[buried++] = pair[i];
  }
}

static side *new_side(int fd) {
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  side *s = calloc(1, sizeof *s);
  s->fd = fd;
  return s;
}

static void accept_all(int listener, const struct sockaddr_in *target) {
  for (;;) {
    int client = accept4(listener, 0, 0, SOCK_NONBLOCK);
    if (client < 0) return;
    int worker = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(worker, (const void *)target, sizeof *target)) {
      close(client);
      close(worker);
      continue;
    }
    side *a = new_side(client), *b = new_side(worker);
    a->peer = b;
    b->peer = a;
    watch(a, EPOLL_CTL_ADD);
    watch(b, EPOLL_CTL_ADD);
  }
}

static void drain(side *s) {
  ssize_t n = send(s->fd, s->pending + s->offset, s->length - s->offset, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n > 0) s->offset += n;
  if (s->offset < s->length) return;
  free(s->pending);
  s->pending = 0;
  s->offset = s->length = 0;
  s->peer->paused = 0;
  watch(s, EPOLL_CTL_MOD);
  watch(s->peer, EPOLL_CTL_MOD);
}

static void forward(side *s) {
  static char buffer[BUFFER];
  ssize_t got = recv(s->fd, buffer, sizeof buffer, MSG_DONTWAIT);
  if (got < 0 && errno == EAGAIN) return;
  if (got <= 0) {
    close_pair(s);
    return;
  }
  ssize_t sent = send(s->peer->fd, buffer, got, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (sent < 0 && errno != EAGAIN) {
    close_pair(s);
    return;
  }
  if (sent < 0) sent = 0;
  if (sent == got) return;
  side *peer = s->peer;
  peer->length = got - sent;
  peer->offset = 0;
  peer->pending = malloc(peer->length);
  memcpy(peer->pending, buffer + sent, peer->length);
  s->paused = 1;
  watch(peer, EPOLL_CTL_MOD);
  watch(s, EPOLL_CTL_MOD);
}

int main(int argc, char **argv) {
  if (argc != 3) {
    fprintf(stderr, "usage: relay LISTEN_PORT TARGET_PORT\n");
    return 2;
  }
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
  here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  struct sockaddr_in target = here;
  target.sin_port = htons(atoi(argv[2]));
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener, (void *)&here, sizeof here) || listen(listener, 4096)) {
    perror("relay: listen");
    return 1;
  }
  epoll_fd = epoll_create1(0);
  side acceptor = {.fd = listener};
  watch(&acceptor, EPOLL_CTL_ADD);
  static struct epoll_event events[EVENTS];
  for (;;) {
    int n = epoll_wait(epoll_fd, events, EVENTS, -1);
    for (int i = 0; i < n; i++) {
      side *s = events[i].data.ptr;
      if (s == &acceptor) {
        accept_all(listener, &target);
        continue;
      }
      if (!s->closed && events[i].events & EPOLLOUT) drain(s);
      if (!s->closed && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) forward(s);
    }
    for (int i = 0; i < buried; i++) {
      free(graveyard[i]->pending);
      free(graveyard[i]);
    }
    buried = 0;
  }
}
