package alchemist.spark;

import java.io.Closeable;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.net.InetSocketAddress;
import java.net.SocketTimeoutException;
import java.net.StandardSocketOptions;
import java.nio.ByteBuffer;
import java.nio.channels.SocketChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.InvalidPathException;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.security.GeneralSecurityException;
import java.security.MessageDigest;
import java.security.SecureRandom;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;

/**
 * An authenticated connection to a node's data endpoint: frames and payloads.
 *
 * <p>The format is described in {@code mpi_workers/wire/frames.py} and {@code handshake.py}. On the
 * same node, which the endpoint proves ({@code node_proof.py}), the ranks' memory is mapped.
 */
final class Connection implements Closeable {
    private static final int HELLO = 1, WELCOME = 2, REFUSED = 3, PUT = 7, GET = 8, DATA = 9, MAP = 10;
    private static final int UNMAP = 11, SYNC = 12, CHALLENGE = 13, PROOF = 14, SAME_NODE = 15;

    private static final byte[] MAGIC = "ALCH".getBytes(StandardCharsets.US_ASCII);
    private static final short VERSION = 3;
    private static final String CONTEXT = "alchemist-on-ray wire " + VERSION + " ";
    private static final int HEADER_BYTES = 20;
    private static final int MAP_LIMIT = 64 << 20;
    private static final int NONCE_BYTES = 32;
    private static final int CONNECT_TIMEOUT_MS = 10_000;
    private static final int STALL_TIMEOUT_MS = 600_000; // as STALL_TIMEOUT_S of node_connection.py
    private static final int SOCKET_BYTES = 1 << 20;
    private static final int STAGING_BYTES = 512 << 10;

    final Target.Node node;
    boolean near; // this process is on the node, and has mapped the ranks' memory
    final List<RankBlock> blocks = new ArrayList<>(); // if it is
    long sentBytes, sentNanos, putBegan;
    private final SocketChannel channel;
    private final String name;
    private ByteBuffer buffer; // a part of a payload on its way
    private long payload; // bytes of the last frame's payload
    private long left; // of them, not yet read

    private Connection(SocketChannel channel, Target.Node node) {
        this.channel = channel;
        this.node = node;
        name = node.host + ":" + node.port;
    }

    /**
     * Connections to all nodes of a matrix. Where this process is on the node of a rank, its block
     * is mapped, to read the chosen columns, or to write them until {@link #beginUnmap}.
     */
    static List<Connection> all(Target target, int[] chosen, boolean write) throws IOException {
        List<Connection> found = new ArrayList<>();
        try {
            for (Target.Node node : target.nodes) {
                Connection one = new Connection(SocketChannel.open(), node);
                found.add(one);
                one.open(target);
                InetSocketAddress peer = (InetSocketAddress) one.channel.getRemoteAddress();
                InetSocketAddress here = (InetSocketAddress) one.channel.getLocalAddress();
                if (target.mapped && peer.getAddress().equals(here.getAddress())
                        && one.sameNode()) {
                    one.map(target, chosen, write);
                }
            }
        } catch (IOException | RuntimeException error) {
            closeAll(found);
            throw error;
        }
        return found;
    }

    private void open(Target target) throws IOException {
        channel.setOption(StandardSocketOptions.SO_SNDBUF, SOCKET_BYTES);
        channel.socket().connect(new InetSocketAddress(node.host, node.port), CONNECT_TIMEOUT_MS);
        channel.socket().setSoTimeout(STALL_TIMEOUT_MS);
        channel.setOption(StandardSocketOptions.TCP_NODELAY, true);
        channel.setOption(StandardSocketOptions.SO_KEEPALIVE, true);
        authenticate(target.token);
    }

    private void authenticate(String token) throws IOException {
        byte[] nonce = new byte[NONCE_BYTES];
        new SecureRandom().nextBytes(nonce);
        send(HELLO, Collections.singletonMap("nonce", nonce));
        Map<String, Object> challenge = expect(CHALLENGE);
        byte[] theirs = (byte[]) challenge.get("nonce"), proof = (byte[]) challenge.get("proof");
        byte[] fields = MessagePack.pack(Collections.singletonMap("role", "data"));
        if (!MessageDigest.isEqual(proof, proof("listening", token, nonce, theirs, new byte[0]))) {
            throw new Failure(
                    "AuthError",
                    "the process at " + name + " does not have the gang's token: it belongs to "
                            + "another gang, or is not Alchemist's");
        }
        Map<String, Object> answer = new LinkedHashMap<>();
        answer.put("proof", proof("connecting", token, nonce, theirs, fields));
        answer.put("fields", fields);
        send(PROOF, answer);
        expect(WELCOME);
    }

    private static byte[] proof(
            String side, String token, byte[] nonce, byte[] theirs, byte[] fields) {
        try {
            MessageDigest digest = MessageDigest.getInstance("SHA-256");
            byte[] key = digest.digest(token.getBytes(StandardCharsets.UTF_8));
            Mac mac = Mac.getInstance("HmacSHA256");
            mac.init(new SecretKeySpec(key, "HmacSHA256"));
            mac.update((CONTEXT + side).getBytes(StandardCharsets.US_ASCII));
            mac.update(nonce);
            mac.update(theirs);
            return mac.doFinal(fields);
        } catch (GeneralSecurityException error) {
            throw new IllegalStateException(error); // every Java has both
        }
    }

    /** Whether this process finds the endpoint's files: it is on its node, and of its user. */
    private boolean sameNode() throws IOException {
        send(SAME_NODE, Collections.emptyMap());
        Map<String, Object> answer = expect(SAME_NODE);
        byte[] nonce = (byte[]) answer.get("nonce");
        try {
            Path path = Paths.get((String) answer.get("path"));
            return Files.isRegularFile(path) && Files.size(path) == nonce.length // not a pipe
                    && MessageDigest.isEqual(nonce, Files.readAllBytes(path));
        } catch (IOException | InvalidPathException error) {
            return false;
        }
    }

    private void map(Target target, int[] chosen, boolean write) throws IOException {
        Map<String, Object> body = target.request(node);
        body.put("write", write);
        body.put("paths", true);
        send(MAP, body);
        Map<String, Object> answer = expect(MAP);
        List<?> parts = (List<?>) answer.get("parts"), paths = (List<?>) answer.get("paths");
        near = true;
        for (int k = 0; k < node.held.size(); k++) {
            long nbytes = (Long) ((List<?>) parts.get(k)).get(2);
            blocks.add(new RankBlock(
                    target, node.held.get(k), chosen, (String) paths.get(k), nbytes));
        }
    }

    /** End the use of the blocks, and tell the ranks how much was written. */
    void beginUnmap(Target target) throws IOException {
        List<Object> written = new ArrayList<>();
        for (RankBlock block : blocks) {
            block.close();
            written.add(Arrays.asList(block.rank, block.written()));
            sentBytes += block.written() * target.element.nbytes;
        }
        Map<String, Object> body = new LinkedHashMap<>();
        body.put("matrix", target.matrix);
        body.put("written", written);
        send(UNMAP, body);
    }

    /** Begin a PUT; its payload follows through {@link #write}, then {@link #endPut}. */
    void beginPut(Map<String, Object> body, long nbytes) throws IOException {
        sentBytes += nbytes;
        putBegan = System.nanoTime();
        sendHead(PUT, body, nbytes);
        buffer = buffer != null ? buffer : ByteBuffer.allocateDirect(STAGING_BYTES);
        buffer.clear();
    }

    void write(byte[] bytes, int at, int length) throws IOException {
        for (int done = 0; done < length; ) {
            if (!buffer.hasRemaining()) {
                flush();
            }
            int part = Math.min(length - done, buffer.remaining());
            buffer.put(bytes, at + done, part);
            done += part;
        }
    }

    void endPut() throws IOException {
        flush();
        sentNanos += System.nanoTime() - putBegan;
    }

    /** Stream the buffer. Fails with the endpoint's reason if it has refused the frame. */
    private void flush() throws IOException {
        buffer.flip();
        try {
            while (buffer.hasRemaining()) {
                if (channel.socket().getInputStream().available() > 0) {
                    throw new IOException("the data endpoint refused the data");
                }
                channel.write(buffer);
            }
        } catch (IOException error) {
            throw refusal(error);
        }
        buffer.clear();
    }

    /** Ask for a payload of this size; it is read through {@link #read(byte[], int, int)}. */
    void get(Map<String, Object> body, long nbytes) throws IOException {
        send(GET, body);
        expect(DATA);
        left = payload;
        if (left != nbytes) {
            throw new IOException("the node sent " + left + " bytes instead of " + nbytes);
        }
        buffer = buffer != null ? buffer : ByteBuffer.allocate(STAGING_BYTES);
        buffer.limit(0);
    }

    void read(byte[] into, int at, int length) throws IOException {
        for (int done = 0; done < length; ) {
            if (!buffer.hasRemaining()) {
                buffer.clear();
                buffer.limit((int) Math.min(buffer.capacity(), left));
                left -= buffer.limit();
                read(buffer);
            }
            int part = Math.min(length - done, buffer.remaining());
            buffer.get(into, at + done, part);
            done += part;
        }
    }

    /** Ask the endpoint to store and count everything. */
    void beginSync() throws IOException {
        send(SYNC, Collections.emptyMap());
    }

    /** Wait until it has; its times. */
    Map<String, Object> endSync() throws IOException {
        return expect(SYNC);
    }

    private void send(int kind, Map<String, ?> body) throws IOException {
        sendHead(kind, body, 0);
    }

    private void sendHead(int kind, Map<String, ?> body, long payloadBytes) throws IOException {
        byte[] packed = body.isEmpty() ? new byte[0] : MessagePack.pack(body);
        ByteBuffer head = ByteBuffer.allocate(HEADER_BYTES + packed.length);
        head.put(MAGIC).putShort(VERSION).putShort((short) kind);
        head.putInt(packed.length).putLong(payloadBytes).put(packed).flip();
        try {
            while (head.hasRemaining()) {
                channel.write(head);
            }
        } catch (IOException error) {
            throw refusal(error);
        }
    }

    /** The reason that the endpoint gives before it closes a connection. */
    private IOException refusal(IOException error) {
        if (!channel.isOpen()) { // interrupted
            return error;
        }
        try {
            expect(SYNC);
        } catch (Failure failure) {
            return failure;
        } catch (IOException again) {
            error.addSuppressed(again);
        }
        return error;
    }

    /** The map of the next frame, which must be of this kind. */
    private Map<String, Object> expect(int kind) throws IOException {
        ByteBuffer head = ByteBuffer.allocate(HEADER_BYTES);
        read(head);
        byte[] magic = new byte[MAGIC.length];
        head.get(magic);
        short version = head.getShort();
        int found = head.getShort();
        int mapBytes = head.getInt();
        payload = head.getLong();
        if (!MessageDigest.isEqual(magic, MAGIC) || version != VERSION) {
            throw new IOException(name + " does not speak version " + VERSION
                    + " of Alchemist's protocol: install the same alchemist-on-ray on both sides");
        }
        if (mapBytes < 0 || mapBytes > MAP_LIMIT) {
            throw new IOException("a map of " + mapBytes + " bytes is over the limit");
        }
        ByteBuffer packed = ByteBuffer.allocate(mapBytes);
        read(packed);
        Map<String, Object> body = MessagePack.unpack(packed.array());
        if (found == REFUSED) {
            throw new Failure(body);
        }
        if (found != kind) {
            throw new IOException("expected a frame of kind " + kind + ", got " + found);
        }
        return body;
    }

    /** Fill a buffer with an array, and flip it. */
    private void read(ByteBuffer into) throws IOException {
        InputStream stream = channel.socket().getInputStream(); // a channel's own read has no limit
        while (into.hasRemaining()) {
            int found;
            try {
                int at = into.arrayOffset() + into.position();
                found = stream.read(into.array(), at, into.remaining());
            } catch (SocketTimeoutException error) {
                throw new IOException("the data endpoint at " + name + " sent nothing for "
                        + STALL_TIMEOUT_MS / 1000 + " s", error);
            }
            if (found < 0) {
                throw new EOFException("the data endpoint at " + name + " closed the connection");
            }
            into.position(into.position() + found);
        }
        into.flip();
    }

    static void closeAll(List<Connection> some) throws IOException {
        for (Connection one : some) {
            one.close();
        }
    }

    @Override
    public void close() throws IOException { // it ends the use of the ranks' memory
        blocks.forEach(RankBlock::close);
        channel.close();
    }
}
