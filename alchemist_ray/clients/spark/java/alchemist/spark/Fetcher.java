package alchemist.spark;

import java.io.Closeable;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

/** Fetches regions of a matrix; connects at the first one. */
final class Fetcher implements Closeable {
    static final int BATCH_BYTES = 4 << 20; // of elements, fetched at once

    final Target target;
    private final List<Connection> connections = new ArrayList<>();
    private byte[] block = {};

    Fetcher(Target target) {
        this.target = target;
    }

    /** The elements of a region (row0, row1, col0, col1) by rows or columns, until the next call. */
    byte[] fetch(long[] region, boolean byRow) throws IOException {
        int itemsize = target.element.nbytes;
        long height = region[1] - region[0], width = region[3] - region[2];
        int nbytes = Math.toIntExact(Math.multiplyExact(height, width * itemsize));
        if (block.length < nbytes) {
            block = new byte[nbytes];
        }
        while (connections.size() < target.nodes.size()) {
            Target.Node node = target.nodes.get(connections.size());
            connections.add(Connection.open(node, target, nbytes));
        }
        for (int k = 0; k < connections.size(); k++) {
            Target.Node node = target.nodes.get(k);
            Share share = new Share(node, region, itemsize, byRow);
            if (share.nbytes() > 0) {
                connections.get(k).get(target.request(node, region, byRow), share.nbytes());
                share.receive(connections.get(k), block, (byRow ? width : height) * itemsize);
            }
        }
        return block;
    }

    @Override
    public void close() throws IOException {
        for (Connection connection : connections) {
            connection.close();
        }
    }
}
